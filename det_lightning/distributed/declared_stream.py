"""An IterableDataset that declares its length and can start anywhere, so that every rank reads exactly its samples.

    __len__() -> int                               samples of an epoch
    iter_from(epoch: int, index: int) -> Iterator  the samples of that epoch from this place on, in the order of the epoch

`iter_from` is a function of its arguments: the same samples in every process and at every call. It is called once for
each slice that does not begin where the one before ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.errors import InputError


def is_declared(dataset: object) -> bool:
    """Whether an IterableDataset has the two methods."""
    return hasattr(dataset, "__len__") and callable(getattr(dataset, "iter_from", None))


class DeclaredStream(Dataset):
    """Such a data set, asked for samples by (epoch, index)."""

    def __init__(self, stream: IterableDataset):
        self.stream = stream
        self._samples: Iterator[Any] = iter(())
        self._next: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        if place != self._next:
            self._samples = iter(self.stream.iter_from(epoch, index))
        self._next = epoch, index + 1
        try:
            return next(self._samples)
        except StopIteration:
            raise InputError(
                f"the data set {type(self.stream).__name__} declares {len(self)} samples, but its iter_from ended before "
                f"sample {index} of epoch {epoch}. __len__ must be the number of samples of every epoch."
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which begins anew: an iterator need not survive the way."""
        return {"stream": self.stream, "_samples": iter(()), "_next": None}


@dataclass(frozen=True)
class StreamOrder(SampleOrder):
    """The order in which such a data set yields its samples; a sample's index is its place in the epoch."""

    def requests(self, epoch: int, indices: np.ndarray) -> list[tuple[int, int]]:
        return [(epoch, index) for index in indices.tolist()]
