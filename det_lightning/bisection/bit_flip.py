"""Finds the one bit whose flip explains two digests of a tensor, given the tensor before the flip.

The lanes of a tensor digest are sums of mix(place, word) over the tensor's 32-bit words, so a change of one
word b to b' at place j moves them by mix(j, b') - mix(j, b), whatever the rest holds. All places and bits are
tried; both lanes must agree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy

from det_lightning.arithmetic.tensor_digest import (
    HIGH_INDEX_FACTOR,
    SECOND_LANE_FACTOR,
    SECOND_LANE_MULTIPLIER,
    SPLITMIX_FIRST,
    SPLITMIX_SECOND,
)
from det_lightning.errors import InputError

_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 15
# dtype name: (all bits but the sign, infinity, canonical NaN); a digest sees every NaN as the canonical one
_NANS = {
    "float32": (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    "bfloat16": (0x7FFF, 0x7F80, 0x7FC0),
    "float16": (0x7FFF, 0x7C00, 0x7E00),
}


def digest_delta(reference: bytes, candidate: bytes) -> tuple[int, int]:
    """How far the two lanes moved, modulo 2^64, from one 16-byte tensor digest to another of the same dtype
    and shape.
    """
    if len(reference) != 16 or len(candidate) != 16:
        raise InputError(f"tensor digests are 16 bytes, not {len(reference)} and {len(candidate)}")
    ours, theirs = struct.unpack("<QQ", reference), struct.unpack("<QQ", candidate)
    return (theirs[0] - ours[0]) & _MASK, (theirs[1] - ours[1]) & _MASK


def words_of(array: numpy.ndarray) -> numpy.ndarray:
    """The tensor as the digest reads it: uint32 words in row-major order, 8 and 16 bits extended by zeros, 64
    bits as two words, low first.

    NaNs of the array's float type become canonical.
    """
    array = numpy.ascontiguousarray(array)
    if array.dtype.kind in "fc" and array.size:
        parts = array.reshape(-1).view(f"f{array.itemsize // (2 if array.dtype.kind == 'c' else 1)}")
        array = numpy.where(numpy.isnan(parts), numpy.array(numpy.nan, parts.dtype), parts)
    flat = array.reshape(-1)
    if flat.dtype.itemsize in (1, 2):
        return flat.view(f"<u{flat.dtype.itemsize}").astype(numpy.uint32)
    if flat.dtype.itemsize in (4, 8):
        return flat.view("<u4")
    raise InputError(f"no tensor digest reads dtype {array.dtype}")


def find_flipped_bit(
    words: numpy.ndarray,
    delta: tuple[int, int],
    *,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int] | None:
    """(word, bit) such that flipping that bit of that word moves the two lanes by `delta`; None if no or more
    than one bit does.

    words: uint32, as `words_of` gives them. dtype: name of the tensor's type; where a flip makes a NaN, the
    digest saw the canonical one.
    progress: called with (words tried, words in all).
    """
    if words.dtype != numpy.uint32 or words.ndim != 1:
        raise InputError(f"words must be a flat uint32 array, not {words.ndim}-dimensional {words.dtype}")
    bits = numpy.uint32(1) << numpy.arange(32, dtype=numpy.uint32)
    found: list[tuple[int, int]] = []
    for start in range(0, len(words), _CHUNK_WORDS):
        if progress is not None:
            progress(start, len(words))
        chunk = words[start : start + _CHUNK_WORDS]
        places = numpy.arange(start, start + len(chunk), dtype=numpy.uint64)
        clean0, clean1 = mix_words(places, chunk)
        flipped = _with_canonical_nan(chunk[:, None] ^ bits[None, :], dtype)
        # lane 0 alone settles nearly every place; the few that remain are checked in lane 1
        moved0 = _mix_lane0(places[:, None], flipped) - clean0[:, None]
        for row, bit in zip(*numpy.nonzero(moved0 == numpy.uint64(delta[0])), strict=True):
            _, lane1 = mix_words(places[row : row + 1], flipped[row, bit : bit + 1])
            if (lane1 - clean1[row : row + 1])[0] == numpy.uint64(delta[1]):
                found.append((start + int(row), int(bit)))
    return found[0] if len(found) == 1 else None


def mix_words(places: numpy.ndarray, words: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """What each word adds to lane 0 and lane 1: `arithmetic.tensor_digest` on arrays. places: uint64; words:
    uint32.
    """
    lane0 = _mix_lane0(places, words)
    lane1 = lane0 * numpy.uint64(SECOND_LANE_FACTOR)
    lane1 ^= lane1 >> numpy.uint64(32)
    lane1 *= numpy.uint64(SECOND_LANE_MULTIPLIER)
    lane1 ^= lane1 >> numpy.uint64(29)
    return lane0, lane1


def _mix_lane0(places: numpy.ndarray, words: numpy.ndarray) -> numpy.ndarray:
    mixed = (places << numpy.uint64(32)) | words
    mixed += (places >> numpy.uint64(32)) * numpy.uint64(HIGH_INDEX_FACTOR)
    mixed ^= mixed >> numpy.uint64(30)
    mixed *= numpy.uint64(SPLITMIX_FIRST)
    mixed ^= mixed >> numpy.uint64(27)
    mixed *= numpy.uint64(SPLITMIX_SECOND)
    mixed ^= mixed >> numpy.uint64(31)
    return mixed


def _with_canonical_nan(words: numpy.ndarray, dtype: str) -> numpy.ndarray:
    if dtype not in _NANS:
        return words
    magnitude, infinity, canonical = (numpy.uint32(bits) for bits in _NANS[dtype])
    is_nan = (words & magnitude) > infinity
    return numpy.where(is_nan, canonical, words)
