"""Names the flipped bit behind two digests of one tensor, with its values before and after, given the tensor
before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy
from blake3 import blake3

from det_lightning.bisection.bit_flip import digest_delta, find_flipped_bit, mix_words, words_of
from det_lightning.bisection.element import ElementPair, pair_fields
from det_lightning.errors import InputError


@dataclass(frozen=True)
class FlippedBit(ElementPair):
    """One flipped bit of a tensor: the element before and after. bit: 0 is the lowest of the element."""

    bit: int


def flipped_bit(
    array: numpy.ndarray,
    reference_digest: bytes,
    candidate_digest: bytes,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> FlippedBit | None:
    """The one bit of `array` whose flip turns `reference_digest` into `candidate_digest`, None if there is no
    such bit.

    array: the tensor with `reference_digest`; a bfloat16 tensor is given as its bits in uint16.
    Raises InputError if it has another digest.
    """
    dtype = _dtype_of(array, reference_digest)
    words = words_of(array)
    found = find_flipped_bit(words, digest_delta(reference_digest, candidate_digest), dtype=dtype, progress=progress)
    if found is None:
        return None
    words_per_element = max(1, array.dtype.itemsize // 4)
    element, word_in_element = divmod(found[0], words_per_element)
    bit = found[1] + 32 * word_in_element
    start = element * words_per_element
    before = sum(int(word) << 32 * i for i, word in enumerate(words[start : start + words_per_element]))
    after = before ^ 1 << bit
    return FlippedBit(**pair_fields(array, element, before, after, dtype), bit=bit)


def array_digest(array: numpy.ndarray, dtype: str) -> bytes:
    """The tensor digest of an array whose torch dtype has this name: `ledger.digest.tensor_digest` without
    torch.
    """
    words = words_of(array)
    lanes = mix_words(numpy.arange(len(words), dtype=numpy.uint64), words)
    key = blake3(f"{dtype}|{','.join(map(str, array.shape))}".encode()).digest()[:16]
    sums = (int(numpy.sum(lane, dtype=numpy.uint64)) + k for lane, k in zip(lanes, _two(key), strict=True))
    return struct.pack("<QQ", *(each % 2**64 for each in sums))


def _two(digest: bytes) -> tuple[int, int]:
    return struct.unpack("<QQ", digest)


def _dtype_of(array: numpy.ndarray, digest: bytes) -> str:
    names = [array.dtype.name] + (["bfloat16"] if array.dtype == numpy.uint16 else [])
    for name in names:
        if array_digest(array, name) == digest:
            return name
    raise InputError(
        f"the {array.dtype} tensor of shape {array.shape} is not the one that was recorded: its digest is "
        f"{array_digest(array, names[0]).hex()}, the ledger has {digest.hex()}; the replay did not "
        "reproduce it"
    )
