"""The two digest lanes of a tensor: `arithmetic.tensor_digest.lanes` on whole arrays."""

import numpy as np

from ....arithmetic.tensor_digest import (
    HIGH_INDEX_FACTOR,
    SECOND_LANE_FACTOR,
    SECOND_LANE_MULTIPLIER,
    SPLITMIX_FIRST,
    SPLITMIX_SECOND,
)
from .compiler import device_function, kernel
from .integers import shift_right_logical
from .memory import integers_2, words_1


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_HIGH_INDEX, _FIRST, _SECOND, _LANE, _MULTIPLIER = map(
    _signed, (HIGH_INDEX_FACTOR, SPLITMIX_FIRST, SPLITMIX_SECOND, SECOND_LANE_FACTOR, SECOND_LANE_MULTIPLIER)
)

_WORD = (1 << 32) - 1


@device_function
def mix(j, bits):
    """`arithmetic.tensor_digest.mix`: what the word `bits` at place j adds to the two lanes, modulo 2^64."""
    z = ((j << 32) | bits) + (j >> 32) * _HIGH_INDEX
    z = (z ^ shift_right_logical(z, 30)) * _FIRST
    z = (z ^ shift_right_logical(z, 27)) * _SECOND
    z = z ^ shift_right_logical(z, 31)
    y = z * _LANE
    y = (y ^ shift_right_logical(y, 32)) * _MULTIPLIER
    return z, y ^ shift_right_logical(y, 29)


@device_function
def fetched(words, start, stop):
    """Brings words [start, stop) near: one load a cache line, many under way at once. Beside the long mixes few would be,
    and memory would be waited for twice as long as the mixes take. The value has no meaning, but must be stored."""
    seen = 0
    for j in range(start, stop, 16):
        seen |= words[j]
    return seen


@kernel
def lanes_block(start, stop, words_at, length, blocks_a_run, place, run, stride, magnitude_mask, infinity, nan, out_at):
    """out[b] = lanes of the words of block b; words: int32 in runs of `run`, `length` words a block but for the last of a
    run; out: int64 [blocks, 2]. The first words of the runs stand at place, place + stride, ...

    A word whose bits under `magnitude_mask` exceed `infinity` becomes `nan`; a mask of 0 leaves all words alone.
    """
    words, out = words_1(words_at, stop * length), integers_2(out_at, stop, 2)
    for block in range(start, stop):
        first, second = 0, 0
        number = block // blocks_a_run
        begin, end = number * run + block % blocks_a_run * length, (number + 1) * run
        end = min(begin + length, end)
        moved = place + number * (stride - run)
        out[block, 0] = fetched(words, begin, end)
        for j in range(begin, end):
            bits = np.int64(words[j]) & _WORD
            if (bits & magnitude_mask) > infinity:
                bits = nan
            z, y = mix(moved + j, bits)
            first += z
            second += y
        out[block, 0], out[block, 1] = first, second


@kernel
def float64_lanes_block(
    start, stop, words_at, length, blocks_a_run, place, run, stride, high_infinity, high_nan, out_at
):
    """Like `lanes_block` for float64: two words an element, low word first; all numbers of words even."""
    words, out = words_1(words_at, stop * length), integers_2(out_at, stop, 2)
    for block in range(start, stop):
        first, second = 0, 0
        number = block // blocks_a_run
        begin, end = number * run + block % blocks_a_run * length, (number + 1) * run
        end = min(begin + length, end)
        moved = place + number * (stride - run)
        out[block, 0] = fetched(words, begin, end)
        for j in range(begin, end, 2):
            low, high = np.int64(words[j]) & _WORD, np.int64(words[j + 1]) & _WORD
            magnitude = high & 0x7FFFFFFF
            if magnitude > high_infinity or (magnitude == high_infinity and low != 0):
                low, high = 0, high_nan
            z, y = mix(moved + j, low)
            u, v = mix(moved + j + 1, high)
            first += z + u
            second += y + v
        out[block, 0], out[block, 1] = first, second
