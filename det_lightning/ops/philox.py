"""Counter-based random bits: a pure function of (key, counter), the same on every machine, device and rank.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011). The counter's words are
int64 tensors with values in [0, 2^32); no product below exceeds 2^48, so nothing relies on overflow.
"""

from collections.abc import Sequence

import torch

from ..errors import InputError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def _check_key(key: int) -> None:
    if not 0 <= key < 2**64:
        raise InputError(f"the seed {key} is outside [0, 2^64); pass a non-negative 64-bit integer")


def philox_words(key: int, counter: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Four random 32-bit words per counter.

    Args:
        key: 0 <= key < 2^64.
        counter: four int64 tensors that broadcast, values in [0, 2^32).

    Returns:
        Four int64 tensors with values in [0, 2^32).
    """
    _check_key(key)
    words = list(torch.broadcast_tensors(*counter))
    keys = [key & _MASK, key >> 32]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = _product(words[0], 0), _product(words[2], 1)
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(word + step) & _MASK for word, step in zip(keys, _KEY_STEPS, strict=True)]
    return words


def _product(word: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of word times a multiplier, in halves of 16 bits."""
    upper, lower = word * (_MULTIPLIERS[place] >> 16), word * (_MULTIPLIERS[place] & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def derived_key(key: int, *counter: int) -> int:
    """A 64-bit key for a place: the first two words of one counter (at most four integers below 2^32)."""
    _check_key(key)
    words = [*counter, *(0,) * (4 - len(counter))]
    keys = [key & _MASK, key >> 32]
    for _ in range(_ROUNDS):
        products = (words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1])
        words = [
            products[1] >> 32 ^ words[1] ^ keys[0],
            products[1] & _MASK,
            products[0] >> 32 ^ words[3] ^ keys[1],
            products[0] & _MASK,
        ]
        keys = [(word + step) & _MASK for word, step in zip(keys, _KEY_STEPS, strict=True)]
    return words[0] | words[1] << 32
