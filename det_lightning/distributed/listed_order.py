"""The order that a user's own sampler lists: length buckets, token budgets, weights, subsets.

A sampler becomes a function of (seed, epoch): it is told the epoch, random generators are seeded from both while it lists,
and what it lists is taken by every rank. A batch of a batch sampler is one global batch, which is cut like any other.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.errors import UncoveredError
from det_lightning.ops.philox import derived_key

_DOMAIN = 0x6C697374


class Listing:
    """What a sampler lists in an epoch.

    Args:
        sampler: of single indices, or with `batched` of lists of them.
        seed: of the run.
        told: objects whose set_epoch is called.
    """

    def __init__(self, sampler: Iterable[Any], *, batched: bool, seed: int, told: Iterable[Any] = ()):
        self.sampler, self.batched, self.seed = sampler, batched, seed
        self._told = [sampler, *told, getattr(sampler, "sampler", None)]  # the last: what a batch sampler draws from

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
        """(int64 [n] indices in their order, int64 [steps + 1] where each batch begins and the last one ends, or None)."""
        with _seeded(derived_key(self.seed, epoch, _DOMAIN)) as key:
            for each in self._told:
                if hasattr(each, "set_epoch"):
                    each.set_epoch(epoch)
                if isinstance(getattr(each, "generator", None), torch.Generator):
                    each.generator.manual_seed(key % 2**63)
            listed = list(self.sampler)
        if not self.batched:
            return np.array([int(index) for index in listed], dtype=np.int64), None
        batches = [[int(index) for index in batch] for batch in listed]
        bounds = np.cumsum([0, *map(len, batches)], dtype=np.int64)
        return np.array([index for batch in batches for index in batch], dtype=np.int64), bounds

    def digest(self, epoch: int) -> str:
        """16 hexadecimal digits of what is listed."""
        indices, bounds = self(epoch)
        content = indices.tobytes() + (b"" if bounds is None else bounds.tobytes())
        return blake2b(content, digest_size=8).hexdigest()


@contextmanager
def _seeded(key: int) -> Iterator[int]:
    """The global generators of torch, NumPy and Python seeded with a key, and as they were afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key % 2**63)
            np.random.seed(key % 2**32)
            random.seed(key)
            yield key
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclass(frozen=True)
class ListedOrder(SampleOrder):
    """A SampleOrder whose epochs are listed.

    Attributes:
        listing: see `Listing`.
    """

    listing: Callable[[int], tuple[np.ndarray, np.ndarray | None]] | None = None

    @property
    def steps(self) -> int:
        bounds = _listed(self.listing, 0)[1]
        if bounds is None:
            return super().steps
        return len(bounds) - 1 if self.most_steps is None else min(len(bounds) - 1, self.most_steps)

    def epoch(self, epoch: int) -> np.ndarray:
        return _listed(self.listing, epoch)[0]

    def bounds(self, epoch: int, step: int) -> tuple[int, int]:
        bounds = _listed(self.listing, epoch)[1]
        return super().bounds(epoch, step) if bounds is None else (int(bounds[step]), int(bounds[step + 1]))


@lru_cache(maxsize=4)
def _listed(listing: Listing, epoch: int) -> tuple[np.ndarray, np.ndarray | None]:
    indices, bounds = listing(epoch)
    first = listing(0) if epoch else (indices, bounds)
    counts = [len(each[0]) if bounds is None else len(each[1]) - 1 for each in (first, (indices, bounds))]
    if counts[0] != counts[1]:
        things = "samples" if bounds is None else "batches"
        raise UncoveredError(
            f"the sampler {type(listing.sampler).__name__} lists {counts[0]} {things} in "
            f"epoch 0 and {counts[1]} in epoch {epoch}. Steps are counted from the run's start, so every epoch must have "
            f"as many; let it drop or repeat the rest."
        )
    indices.setflags(write=False)
    return indices, bounds


def listed_order(
    listing: Listing, *, global_batch: int | None, drop_last: bool, most_steps: int | None, arrangement: int | None
) -> ListedOrder:
    """The order of a sampler's listing.

    Args:
        global_batch: samples of a step; of a batch sampler it is its longest batch, whatever is given.

    Raises:
        UncoveredError: the sampler lists nothing, empty batches, or other samples when asked again for one epoch.
    """
    indices, bounds = listing(0)
    again = listing(0)
    name = type(listing.sampler).__name__
    same = np.array_equal(indices, again[0]) and (bounds is None or np.array_equal(bounds, again[1]))
    if not same:
        raise UncoveredError(
            f"the sampler {name} lists other samples when it is asked again for the same epoch: it keeps a random state of "
            f"its own. Draw from the global generator of torch, or from a torch.Generator in its attribute `generator`; "
            f"both are seeded from (seed, epoch)."
        )
    if len(indices) == 0 or (bounds is not None and int(np.diff(bounds).min()) == 0):
        raise UncoveredError(f"the sampler {name} lists no samples, or an empty batch, in epoch 0.")
    return ListedOrder(
        samples=len(indices),
        global_batch=global_batch if bounds is None else int(np.diff(bounds).max()),
        seed=listing.seed,
        shuffle=True,
        drop_last=drop_last,
        most_steps=most_steps,
        arrangement=arrangement,
        listing=listing,
    )
