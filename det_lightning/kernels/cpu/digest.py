"""The two digest lanes of a tensor: `arithmetic.tensor_digest.lanes` on whole arrays."""

import numpy as np
import torch

from ...arithmetic.formats import FORMATS
from ...arithmetic.tensor_digest import (
    HIGH_INDEX_FACTOR,
    SECOND_LANE_FACTOR,
    SECOND_LANE_MULTIPLIER,
    SPLITMIX_FIRST,
    SPLITMIX_SECOND,
)
from .cache import device_function, kernel
from .integers import shift_right_logical
from .threads import run_blocks


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_HIGH_INDEX, _FIRST, _SECOND, _LANE, _MULTIPLIER = map(
    _signed, (HIGH_INDEX_FACTOR, SPLITMIX_FIRST, SPLITMIX_SECOND, SECOND_LANE_FACTOR, SECOND_LANE_MULTIPLIER)
)

_WORD = (1 << 32) - 1
_LANE_MASK = (1 << 64) - 1


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


@kernel
def lanes_block(start, stop, words, length, magnitude_mask, infinity, nan, out):
    """out[b] = lanes of the words of block b, `length` words a block.

    A word whose bits under `magnitude_mask` exceed `infinity` becomes `nan`; a mask of 0 leaves all words alone.
    """
    for block in range(start, stop):
        first, second = 0, 0
        for j in range(block * length, min((block + 1) * length, words.shape[0])):
            bits = np.int64(words[j]) & _WORD
            if (bits & magnitude_mask) > infinity:
                bits = nan
            z, y = mix(j, bits)
            first += z
            second += y
        out[block, 0], out[block, 1] = first, second


@kernel
def float64_lanes_block(start, stop, words, length, high_infinity, high_nan, out):
    """Like `lanes_block` for float64: two words an element, low word first, `length` even."""
    for block in range(start, stop):
        first, second = 0, 0
        for j in range(block * length, min((block + 1) * length, words.shape[0]), 2):
            low, high = np.int64(words[j]) & _WORD, np.int64(words[j + 1]) & _WORD
            magnitude = high & 0x7FFFFFFF
            if magnitude > high_infinity or (magnitude == high_infinity and low != 0):
                low, high = 0, high_nan
            z, y = mix(j, low)
            u, v = mix(j + 1, high)
            first += z + u
            second += y + v
        out[block, 0], out[block, 1] = first, second


_BLOCK_WORDS = 1 << 14
_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The lanes of `tensor` in row-major order, on a checked argument."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().reshape(-1)
    name, size = str(flat.dtype).removeprefix("torch."), flat.element_size()
    words = flat.view(_UNSIGNED[size])
    if size == 2:
        words = words.to(torch.int32).bitwise_and_(0xFFFF)
    elif size == 1:
        words = words.to(torch.int32)
    blocks = -(-words.numel() // _BLOCK_WORDS)
    out = np.zeros((blocks, 2), np.int64)
    steps = 8 * words.numel()
    form = FORMATS.get(name)
    if name == "float64":
        high_infinity, high_nan = form.infinity_bits >> 32, form.nan_bits >> 32
        run_blocks(float64_lanes_block, blocks, steps, words.numpy(), _BLOCK_WORDS, high_infinity, high_nan, out)
    else:
        mask, infinity, nan = (form.sign_bit - 1, form.infinity_bits, form.nan_bits) if form else (0, 0, 0)
        run_blocks(lanes_block, blocks, steps, words.numpy(), _BLOCK_WORDS, mask, infinity, nan, out)
    first, second = (int(lane) for lane in out.sum(axis=0, dtype=np.int64))
    return first & _LANE_MASK, second & _LANE_MASK
