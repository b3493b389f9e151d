"""Which samples a step takes and how they are cut over ranks and micro-batches: pure functions, no padding."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from det_lightning.distributed.random_bits import permutation
from det_lightning.errors import InputError


@dataclass(frozen=True)
class SampleOrder:
    """The global order of a training run, the same for every world size.

    Step s of an epoch takes positions [s * global_batch, (s + 1) * global_batch) of that epoch's order.

    Attributes:
        samples: length of the data set.
        global_batch: samples of one optimizer step over all ranks and micro-batches.
        seed: key of the permutations; unused without `shuffle`.
        shuffle: a new permutation for each epoch, or the data set's own order.
        drop_last: whether a shorter last step is left out.
        most_steps: an epoch ends after this many steps, whatever is left; None for all.
        arrangement: key of a permutation within each step before it is cut, or None. It moves samples between
            ranks and micro-batches, which moves no bit of the training; for demonstrations and tests of that.
    """

    samples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    most_steps: int | None = None
    arrangement: int | None = None

    def __post_init__(self):
        if self.samples < 1 or self.global_batch < 1:
            raise InputError(
                f"a training order needs at least one sample and a global batch of at least one; "
                f"got {self.samples} samples and a global batch of {self.global_batch}"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of one epoch."""
        whole, rest = divmod(self.samples, self.global_batch)
        steps = whole + (1 if rest and not self.drop_last else 0)
        return steps if self.most_steps is None else min(steps, self.most_steps)

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 [samples], read-only: data set indices in the order of this epoch."""
        return _epoch_order(self.seed if self.shuffle else None, self.samples, epoch)

    def bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """(first, last) positions of a step within the epoch, half open."""
        return step * self.global_batch, min((step + 1) * self.global_batch, self.samples)

    def step(self, epoch: int, step: int) -> np.ndarray:
        """int64 [n]: data set indices of one step by position; n <= global_batch."""
        first, last = self.bounds(epoch, step)
        return self.epoch(epoch)[first:last]

    def requests(self, epoch: int, indices: np.ndarray) -> list[Any]:
        """What a data set is asked for, to get these samples."""
        return indices.tolist()

    def arranged(self, indices: np.ndarray, step: int) -> np.ndarray:
        """The samples of a step in the order in which they are cut."""
        if self.arrangement is None:
            return indices
        return indices[permutation(self.arrangement, len(indices), step)]


@dataclass(frozen=True)
class Slice:
    """One micro-batch of one rank.

    Attributes:
        step: optimizer step within the epoch.
        positions: (first, last) places within the step's samples, half open.
        empty: no sample belongs here; the step's first sample stands in with weight zero, so that all
            collectives meet.
    """

    epoch: int
    step: int
    positions: tuple[int, int]

    @property
    def empty(self) -> bool:
        return self.positions[0] == self.positions[1]


@lru_cache(maxsize=2)  # the epoch that runs, for every step's record; a million samples take half a second
def _epoch_order(seed: int | None, samples: int, epoch: int) -> np.ndarray:
    order = np.arange(samples, dtype=np.int64) if seed is None else permutation(seed, samples, epoch)
    order.setflags(write=False)
    return order


def cut(samples: int, parts: int, part: int) -> tuple[int, int]:
    """The part-th of `parts` contiguous slices of [0, samples), half open; sizes differ by at most one."""
    return samples * part // parts, samples * (part + 1) // parts
