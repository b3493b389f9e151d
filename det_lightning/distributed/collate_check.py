"""Finds collate functions that make a sample's values depend on the others of its micro-batch, or move it to another place:
which samples lie together depends on how the global batch is cut.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from det_lightning.distributed.random_guard import states
from det_lightning.errors import UncoveredError
from det_lightning.kernels.dispatch import unrecorded

CHECKED_BATCHES = 8
_HINT = (
    "What it computes from several samples depends on how the global batch is cut into micro-batches, and random numbers "
    "belong to samples by their places. Compute it in the data set's __getitem__, keep the order of the samples, and pad at "
    "the end."
)


class CheckedCollate:
    """A collate function that compares a sample of each of a pass's first batches with what the sample gives alone.

    Padding behind a sample may differ. What the function cannot do with a single sample is not looked at.
    """

    def __init__(self, collate: Callable[[list], Any]):
        self.collate = collate
        # torch's own puts samples side by side.
        self._left = 0 if collate is default_collate else CHECKED_BATCHES

    def __call__(self, samples: list) -> Any:
        if not self._left or not isinstance(samples, list) or len(samples) < 2:
            return self.collate(samples)
        self._left -= 1
        generators = states()
        places = {self._left % len(samples), *((0, len(samples) - 1) if self._left == CHECKED_BATCHES - 1 else ())}
        alone = [(place, self._alone(samples[place])) for place in sorted(places)]
        drew = states() != generators  # which is refused by itself
        batch = self.collate(samples)
        with unrecorded():
            for place, single in alone:
                for name, there, here in _pairs("", batch, single, place, len(samples)):
                    if not drew and not _begins_with(there, here):
                        raise UncoveredError(
                            f"the collate function {getattr(self.collate, '__name__', type(self.collate).__name__)} gives "
                            f"sample {place} of a micro-batch{name and f', in its {name},'} other values than the sample "
                            f"alone. {_HINT}"
                        )
        return batch

    def _alone(self, sample: Any) -> Any:
        try:
            return self.collate([copy.deepcopy(sample)])
        except Exception:  # of a function that needs several samples nothing can be said
            return None


def _pairs(name: str, batch: Any, single: Any, place: int, samples: int) -> Iterator[tuple[str, Any, Any]]:
    """(where it lies, what a batch holds of the sample at a place, what its batch of one holds)."""
    if isinstance(batch, Mapping) and isinstance(single, Mapping):
        for key in filter(single.__contains__, batch):
            yield from _pairs(f"{name}[{key!r}]", batch[key], single[key], place, samples)
    elif isinstance(batch, (Tensor, np.ndarray)) and type(batch) is type(single):
        if batch.ndim and batch.ndim == single.ndim and (len(batch), len(single)) == (samples, 1):
            yield name, batch[place : place + 1], single
    elif isinstance(batch, Sequence) and isinstance(single, Sequence) and not isinstance(batch, (str, bytes)):
        if len(batch) == len(single):
            for number, (there, here) in enumerate(zip(batch, single, strict=True)):
                yield from _pairs(f"{name}[{number}]", there, here, place, samples)
        elif (len(batch), len(single)) == (samples, 1):
            yield name, batch[place], single[0]


def _begins_with(there: Any, here: Any) -> bool:
    """Whether `there` holds the bits of `here`, with or without padding behind; True of what is not compared."""
    if isinstance(here, Tensor):
        there, here = _as_array(there), _as_array(here)
    if isinstance(here, (int, str)):
        return there == here
    if not isinstance(here, np.ndarray) or here.dtype.hasobject or not isinstance(there, np.ndarray):
        return True
    if there.ndim != here.ndim or there.dtype != here.dtype:
        return True
    if any(size < own for size, own in zip(there.shape, here.shape, strict=True)):
        return True
    return there[tuple(slice(0, size) for size in here.shape)].tobytes() == here.tobytes()


def _as_array(values: Any) -> np.ndarray | None:
    """The elements of a dense tensor, each as its bytes."""
    if not isinstance(values, Tensor) or values.layout is not torch.strided or values.is_nested or values.is_quantized:
        return None
    plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8).numpy()
