"""A DataLoader over one rank's slices of the global order: it says which samples each batch holds.

The batches of a step lie side by side in the step's positions: rank r, micro-batch a is slice r * accumulate + a.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from det_lightning.distributed.collate_check import CheckedCollate
from det_lightning.distributed.declared_stream import DeclaredStream, is_declared
from det_lightning.distributed.random_guard import GuardedCollate, GuardedStart, guarded
from det_lightning.distributed.sample_order import SampleOrder, Slice, cut
from det_lightning.errors import UncoveredError


class SliceSampler:
    """Batches of data set indices for one rank, a pure function of (order, world size, accumulation, steps done).

    Args:
        accumulate: micro-batches of a step, or a function of the epoch that says how many.
        steps_done: says how many optimizer steps the run has made, so that a pass goes on where the run stands.
        stand_ins: whether an empty slice is a batch of one sample that counts for nothing, or none.
        on_epoch: told (epoch, its batches) when one begins.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        world_size: int,
        rank: int,
        accumulate: int | Callable[[int], int],
        steps_done: Callable[[], int] = lambda: 0,
        stand_ins: bool = True,
        on_epoch: Callable[[int, int], None] | None = None,
    ):
        self.order, self.world_size, self.rank = order, world_size, rank
        self._accumulate = accumulate if callable(accumulate) else lambda epoch: accumulate
        self._steps_done, self._stand_ins, self._on_epoch = steps_done, stand_ins, on_epoch

    def place(self) -> tuple[int, int]:
        """(epoch, step within it) of the next pass."""
        return divmod(self._steps_done(), max(self.order.steps, 1))

    def micro_batches(self, epoch: int) -> int:
        """Of each step of an epoch."""
        return self._accumulate(epoch)

    def __len__(self) -> int:
        """Batches of the epoch that the next pass belongs to."""
        return self.order.steps * self._accumulate(self.place()[0])

    @property
    def sampler(self) -> "SliceSampler":
        """Itself: Lightning tells a batch sampler's sampler when an epoch begins."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch; which one it is follows from the steps done."""
        if self._on_epoch is not None:
            self._on_epoch(self.place()[0], len(self))

    def slices(self, epoch: int, start_step: int) -> Iterator[tuple[Slice, list[Any]]]:
        """Each micro-batch of this rank from `start_step` on, with what to ask the data set for."""
        accumulate = self._accumulate(epoch)
        for step in range(start_step, self.order.steps):
            here = self.order.arranged(self.order.step(epoch, step), step)
            for micro in range(accumulate):
                first, last = cut(len(here), self.world_size * accumulate, self.rank * accumulate + micro)
                if first == last and not self._stand_ins:
                    continue
                loaded = here[first:last] if first < last else here[:1]
                yield Slice(epoch, step, (first, last)), self.order.requests(epoch, loaded)

    def __iter__(self) -> Iterator[list[Any]]:
        return (indices for _, indices in self.slices(*self.place()))


class _DigestingCollate:
    """Collates a batch and adds up the digests of its samples, taken before they are collated."""

    def __init__(self, collate: Callable[[list], Any], digest: Callable[[Any], int]):
        self.collate, self.digest = collate, digest

    def __call__(self, samples: list) -> tuple[int, Any]:
        return sum(self.digest(sample) for sample in samples) % 2**64, self.collate(samples)


class SliceLoader(DataLoader):
    """The user's DataLoader over this rank's slices.

    Args:
        digest: of a sample, or None.
        may_draw: whether loading may draw from global random generators, and collate a sample as it likes.

    Attributes:
        current: the Slice whose batch was yielded last.
        current_digest: sum modulo 2^64 of its samples' digests, or None without a digest function.
    """

    def __init__(
        self,
        loader: DataLoader,
        sampler: SliceSampler,
        digest: Callable[[Any], int] | None = None,
        *,
        may_draw: bool = True,
    ):
        check_loader(loader)
        self._digesting, self._may_draw = digest is not None, may_draw
        collate, start = loader.collate_fn, loader.worker_init_fn
        if not may_draw:
            collate, start = GuardedCollate(CheckedCollate(collate)), GuardedStart(start)
        if digest is not None:
            collate = _DigestingCollate(collate, digest)
        streamed = isinstance(loader.dataset, IterableDataset)
        super().__init__(
            DeclaredStream(loader.dataset) if streamed else loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=collate,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=start,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.slice_sampler = sampler
        self.current: Slice | None = None
        self.current_digest: int | None = None

    def __iter__(self) -> Iterator[Any]:
        # A generator: the place is that of the first batch. Lightning makes the iterator before it restores a checkpoint's
        # progress when a scheduler asks how many steps there will be.
        slices = self.slice_sampler.slices(*self.slice_sampler.place())
        batches = super().__iter__()
        batches = batches if self._may_draw else guarded(batches)
        for (here, _), batch in zip(slices, batches, strict=True):
            self.current_digest, batch = batch if self._digesting else (None, batch)
            if here.empty and self._digesting:
                self.current_digest = 0
            self.current = here
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Empty: the place in the epoch follows from the optimizer steps done. Present so that Lightning
        knows the loader as one that resumes within an epoch."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing to load, see `state_dict`."""


def check_loader(loader: DataLoader) -> None:
    """Raises UncoveredError or InputError unless the loader's order can be made a pure function of (seed, epoch)."""
    kind = type(loader).__name__
    if type(loader) is not DataLoader:
        raise UncoveredError(
            f'strategy="det" cuts the samples of torch.utils.data.DataLoader; got a {kind}. '
            f"Pass a plain DataLoader over the same data set."
        )
    if isinstance(loader.dataset, IterableDataset) and not is_declared(loader.dataset):
        raise UncoveredError(
            f"the data set {type(loader.dataset).__name__} is an IterableDataset without an index, so its samples "
            f"cannot be cut the same way at every world size. Give it __len__() and iter_from(epoch, index), which yields "
            f"the samples of that epoch from this place on, or make it a map-style Dataset with __len__ and __getitem__."
        )
    if loader.batch_sampler is None:
        raise UncoveredError(
            'strategy="det" makes the batches itself; the DataLoader has batch_size=None. Pass batch_size=... (and '
            "shuffle=True), or a batch_sampler whose batches are global batches."
        )


def own_sampler(loader: DataLoader) -> tuple[object, bool] | None:
    """(the user's sampler, whether it lists batches), or None if the loader only asks for the data set's order or a
    new one each epoch."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_size is None:  # torch leaves it out where a batch sampler is given
        return loader.batch_sampler, True
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):
        return None
    return sampler, False


def is_shuffled(loader: DataLoader) -> bool:
    """Whether the user asked for a new order each epoch."""
    return isinstance(loader.sampler, RandomSampler)
