"""Random bits of the run: the order of its epochs and its numbers, by counters (`ops.philox`)."""

import numpy as np
import torch

from det_lightning.errors import InputError
from det_lightning.ops.philox import philox_words

_HALF = np.uint64(32)


def philox(seed: int, counter: np.ndarray) -> np.ndarray:
    """Four random 32-bit words per counter.

    Args:
        seed: the key, 0 <= seed < 2^64.
        counter: [..., 4] uint32.

    Returns:
        [..., 4] uint32, a bijection of the counter for each seed.

    Raises:
        InputError: the seed is out of range or the counter's last dimension is not 4.
    """
    if counter.dtype != np.uint32 or counter.shape[-1:] != (4,):
        raise InputError(f"counter must be uint32 [..., 4], got {counter.dtype} {counter.shape}")
    wide = torch.from_numpy(counter.astype(np.int64))
    return torch.stack(philox_words(seed, wide.unbind(-1)), dim=-1).numpy().astype(np.uint32)


def counters(count: int, *rest: int) -> np.ndarray:
    """[count, 4] uint32 counters (index, *rest), missing places zero."""
    table = np.zeros((count, 4), dtype=np.uint32)
    table[:, 0] = np.arange(count, dtype=np.uint32)
    for place, value in enumerate(rest, start=1):
        table[:, place] = value
    return table


def uniform_float32(seed: int, shape: tuple[int, ...], *rest: int) -> np.ndarray:
    """float32 [*shape] in [-1, 1): multiples of 2^-23, exact, from the first word of each counter."""
    count = int(np.prod(shape, dtype=np.int64))
    words = philox(seed, counters(count, *rest))[:, 0]
    centred = (words >> np.uint32(8)).astype(np.int32) - np.int32(2**23)
    return (centred.astype(np.float32) * np.float32(2.0**-23)).reshape(shape)


def permutation(seed: int, count: int, epoch: int) -> np.ndarray:
    """int64 [count]: the order of an epoch, indices sorted by 64 random bits each (ties by index)."""
    words = philox(seed, counters(count, epoch)).astype(np.uint64)
    return np.argsort(words[:, 0] << _HALF | words[:, 1], kind="stable").astype(np.int64)
