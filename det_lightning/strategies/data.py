"""Gives the user's DataLoaders the run's sample order: contiguous slices, no padding, resumable within an epoch."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from det_lightning.distributed.declared_stream import StreamOrder
from det_lightning.distributed.listed_order import ListedOrder, Listing, listed_order
from det_lightning.distributed.sample_order import SampleOrder, Slice
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler, check_loader, is_shuffled, own_sampler
from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import InputError, UncoveredError
from det_lightning.ledger.digest import value_digest
from det_lightning.strategies.accumulation import Accumulation, accumulation_of, follow
from det_lightning.strategies.resume import Stamp, lasting


class TrainingData:
    """The training loader of this rank and where it stands.

    Attributes:
        arrangement: see `SampleOrder`.
    """

    def __init__(self, global_batch: int | None, seed: int | None):
        self._global_batch, self._seed = global_batch, seed
        self.arrangement: int | None = None
        self.order: SampleOrder | None = None
        self._loader: SliceLoader | None = None
        self._limit: int | float | None = None  # of the Trainer, as the user gave it

    def _step_size(self, loader: DataLoader, accumulation: Accumulation, world_size: int) -> int | None:
        if self._global_batch is not None or loader.batch_size is None:
            return self._global_batch
        return accumulation.step_size(loader.batch_size, world_size)

    @property
    def seed(self) -> int:
        return self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))

    def give_limit_back(self, trainer: Any) -> None:
        """The Trainer's limit is the user's again."""
        if self._limit is not None:
            trainer.limit_train_batches, self._limit = self._limit, None

    def take(self, loader: SliceLoader) -> None:
        """This is the training loader."""
        self._loader, self.order = loader, loader.slice_sampler.order

    def place(self) -> tuple[int, int]:
        """(epoch, step within it) that comes next."""
        return self._loader.slice_sampler.place()

    @property
    def current(self) -> Slice:
        """The slice of the batch that was loaded last."""
        return self._loader.current

    @property
    def samples(self) -> int:
        """Samples of the batch that was loaded last; 1 for the one that stands in for an empty slice."""
        first, last = self.current.positions
        return max(last - first, 1)

    @property
    def positions(self) -> Tensor:
        """int64 [samples]: the places of those samples in the epoch's order."""
        here, order = self.current, self.order
        start, end = order.bounds(here.epoch, here.step)
        within = order.arranged(np.arange(end - start, dtype=np.int64), here.step)
        first, last = here.positions
        return torch.from_numpy((within[first:last] if first < last else within[:1]) + start)

    @property
    def current_digest(self) -> int | None:
        return self._loader.current_digest

    def attach(
        self, loader: object, trainer: Any, *, world_size: int, rank: int, record_samples: bool, resumed: Stamp | None
    ) -> SliceLoader:
        """The user's training loader over this rank's slices, at the place where the run stands.

        Raises:
            UncoveredError, InputError: several loaders, limits that cut a step, an order that cannot be reproduced,
                or one that does not continue the checkpoint's.
        """
        if not isinstance(loader, DataLoader):
            raise UncoveredError(
                f'strategy="det" trains on one torch.utils.data.DataLoader, got {type(loader).__name__}.'
            )
        check_loader(loader)
        accumulation = accumulation_of(trainer)
        options = {
            "global_batch": self._step_size(loader, accumulation, world_size),
            "seed": self.seed,
            "arrangement": self.arrangement,
            "reshuffled": not trainer.overfit_batches,
        }
        order = order_of(loader, **options)
        if self._limit is None:
            self._limit = trainer.limit_train_batches
        most_steps = accumulation.steps_within(self._limit, order.steps)
        if most_steps is not None:
            order = replace(order, most_steps=most_steps)
        check_same(order)
        if resumed is not None:
            resumed.check(order)
        automatic = trainer.lightning_module.automatic_optimization
        progress = trainer.fit_loop.epoch_loop.batch_progress
        sampler = SliceSampler(
            order,
            world_size=world_size,
            rank=rank,
            accumulate=accumulation.at,
            # Under manual optimization a batch makes as many optimizer steps as it likes.
            steps_done=lambda: trainer.global_step if automatic else progress.total.completed,
            on_epoch=lambda epoch, batches: follow(trainer, batches, accumulation.at(epoch)),
        )
        if isinstance(self._limit, float) and self._limit != 1.0:
            # Lightning would take the fraction of the micro-batches that are left of it.
            trainer.limit_train_batches = len(sampler)
        cut = SliceLoader(loader, sampler, value_digest if record_samples else None, may_draw=False)
        self.take(cut)
        return cut


def order_of(
    loader: DataLoader,
    *,
    global_batch: int | None,
    seed: int,
    arrangement: int | None = None,
    reshuffled: bool = True,
) -> SampleOrder:
    """The order in which a training loader's samples are taken.

    Args:
        global_batch: None where a batch sampler of the user's own says it.
        reshuffled: whether a loader that shuffles is to.
    """
    own = own_sampler(loader)
    if own is not None:
        listing = Listing(own[0], batched=own[1], seed=seed, told=(loader.sampler,))
        rest = {"drop_last": loader.drop_last, "most_steps": None, "arrangement": arrangement}
        return listed_order(listing, global_batch=global_batch, **rest)
    return _kind_of_order(loader)(
        samples=len(loader.dataset),
        global_batch=global_batch,
        seed=seed,
        shuffle=is_shuffled(loader) and reshuffled,
        drop_last=loader.drop_last,
        arrangement=arrangement,
    )


def _kind_of_order(loader: DataLoader) -> type[SampleOrder]:
    return StreamOrder if isinstance(loader.dataset, IterableDataset) else SampleOrder


def check_same(order: SampleOrder) -> None:
    """Raises UncoveredError unless every rank has the same order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    orders: list[dict[str, Any]] = [{}] * dist.get_world_size()
    mine = lasting(order)
    with other_ranks("the order of samples was compared over the ranks"):
        dist.all_gather_object(orders, mine)
    for rank, other in enumerate(orders):
        name = next((name for name in orders[0] if other.get(name) != orders[0][name]), None)
        if name == "listing":
            raise UncoveredError(
                f"the sampler {type(order.listing.sampler).__name__} lists other samples on another rank. Every rank is to "
                f"list the whole epoch; the strategy cuts it. Use the sampler as for one process, without rank and world "
                f"size."
            )
        if name is not None:
            raise UncoveredError(
                f"the ranks were given unlike data: rank 0 has {name} = {orders[0][name]}, rank {rank} has "
                f"{other.get(name)}. Every rank is to hold the whole data set, which the strategy cuts."
            )


def check_fetching(trainer: Any) -> None:
    """Raises UncoveredError unless one loader hands training_step one batch at a time."""
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1:
        raise UncoveredError(
            f'strategy="det" trains on one DataLoader, got {len(loaders)}. Join the data sets in one, for example with '
            f"torch.utils.data.ConcatDataset or StackDataset."
        )
    if type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise UncoveredError(
            'training_step(dataloader_iter) takes batches by itself, so strategy="det" cannot tell which samples a step '
            "holds. Write training_step(batch, batch_idx)."
        )


def evaluation_loader(
    loader: object, *, world_size: int, rank: int, stand_ins: bool = True, part: float = 1.0
) -> DataLoader:
    """Each sample exactly once over all ranks; with `stand_ins`, a rank without samples gets the batch's first, which is to
    count for nothing.

    With drop_last the samples that fill no batch of the loader are left out, the same ones at every world size.

    Args:
        part: the fraction of the samples, or of a batch sampler's batches, that is shown: the first ones of the order.

    Raises:
        InputError: that is not a single one.
    """
    if not isinstance(loader, DataLoader):
        raise UncoveredError(f'strategy="det" evaluates on torch.utils.data.DataLoader, got {type(loader).__name__}.')
    check_loader(loader)
    own = own_sampler(loader)
    if own is None and len(loader.dataset) < (loader.batch_size if loader.drop_last else 1):
        return loader  # without a batch, as it is
    size = None if loader.batch_size is None else world_size * loader.batch_size
    if own is not None:
        listing = Listing(own[0], batched=own[1], seed=0, told=(loader.sampler,))
        order = listed_order(listing, global_batch=size, drop_last=False, most_steps=None, arrangement=None)
    else:
        order = _kind_of_order(loader)(samples=len(loader.dataset), global_batch=size, shuffle=is_shuffled(loader))
    check_same(order)
    sampler = SliceSampler(
        _part_of(order, loader, part), world_size=world_size, rank=rank, accumulate=1, stand_ins=stand_ins
    )
    return SliceLoader(loader, sampler)


def _part_of(order: SampleOrder, loader: DataLoader, part: float) -> SampleOrder:
    """The first samples of an evaluation's order: without those that drop_last leaves out, and of these the part."""
    batches = loader.batch_size is None
    whole = order.steps if batches else order.samples - (order.samples % loader.batch_size if loader.drop_last else 0)
    kept = int(whole * part)
    if kept == 0 < whole:
        raise InputError(
            f"limit_val_batches or limit_test_batches={part} of {whole} {'batches' if batches else 'samples'} is less than "
            f"one. Pass a larger fraction, or 0 to leave the evaluation out."
        )
    if batches:
        return replace(order, most_steps=kept)
    if type(order) is SampleOrder and kept < order.samples:  # the first ones of the whole data set's permutation
        return ListedOrder(kept, order.global_batch, listing=lambda epoch: (order.epoch(epoch), None))
    return replace(order, samples=kept)
