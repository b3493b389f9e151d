"""Counter-based random bits: a pure function of (key, counter), the same on every machine and rank.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

import numpy as np

from det_lightning.errors import InputError

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDS = 10
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
    if not 0 <= seed < 2**64:
        raise InputError(f"the seed {seed} is outside [0, 2^64); pass a non-negative 64-bit integer")
    if counter.dtype != np.uint32 or counter.shape[-1:] != (4,):
        raise InputError(f"counter must be uint32 [..., 4], got {counter.dtype} {counter.shape}")
    words = [counter[..., place].astype(np.uint64) for place in range(4)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        products = (words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1])
        words = [
            (products[1] >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            products[1] & _LOW,
            (products[0] >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            products[0] & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.stack(words, axis=-1).astype(np.uint32)


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
