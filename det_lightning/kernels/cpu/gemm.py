"""Exact products of matrices: every element is one exact sum, kept as an integer until the one rounding.

Two ways to the same integer. A row whose bits span little becomes 64-bit integers on a common power of two, and a pair
of such rows is summed in 128 bits. Any other pair is summed product by product in a long accumulator.
"""

import numpy as np
import torch

from ...arithmetic.formats import NB, Format
from .cache import device_function, kernel
from .digits import (
    add_integer,
    add_integer_128,
    carry_state,
    count_special,
    count_special_product,
    exponent_of,
    is_special,
    significand_of,
)
from .integers import add_128, bit_length, multiply_add_128, shift_left_128, trailing_zeros
from .rounding import MAGNITUDE_DIGITS, round_128, round_state
from .threads import run_blocks
from .views import float32_bits, from_bits

_NO_BIAS = np.empty(0, np.int32)

WIDE = 1 << 20
"""The width given to rows that no 64-bit integers can hold, and to rows with infinities or NaNs."""

CARRY_TERMS = 1 << 14
"""Products between two carries of a long accumulator (see `add_integer`)."""


@kernel
def scan_rows(start, stop, bits, low, width, integers):
    """Per row of `bits` [rows, K]: x[k] = integers[k] * 2^low, |integers[k]| < 2^width; width = WIDE if that needs 63 bits or more."""
    terms = bits.shape[1]
    for i in range(start, stop):
        lowest, highest = WIDE, -WIDE
        special = False
        for k in range(terms):
            b = np.int64(bits[i, k])
            special = special or is_special(b)
            significand = abs(significand_of(b))
            if significand != 0:
                exponent = exponent_of(b)
                lowest = min(lowest, exponent + trailing_zeros(significand))
                highest = max(highest, exponent + bit_length(significand))
        if highest < lowest:
            lowest, highest = 0, 0
        low[i] = lowest
        width[i] = WIDE if special or highest - lowest > 62 else highest - lowest
        if width[i] == WIDE:
            continue
        for k in range(terms):
            b = np.int64(bits[i, k])
            shift = exponent_of(b) - lowest
            significand = significand_of(b)
            integers[i, k] = significand << shift if shift >= 0 else significand >> min(-shift, 63)


@device_function
def dot_long(state, x, w):
    """state += sum over k of x[k] * w[k], for any float32 patterns. Leaves the state canonical."""
    pending = 0
    for k in range(x.shape[0]):
        a, b = np.int64(x[k]), np.int64(w[k])
        if is_special(a) or is_special(b):
            count_special_product(state, a, b)
            continue
        add_integer(state, significand_of(a) * significand_of(b), exponent_of(a) + exponent_of(b))
        pending += 1
        if pending == CARRY_TERMS:
            carry_state(state)
            pending = 0
    carry_state(state)


@device_function
def dot_128(x, w):
    """The sum over k of x[k] * w[k], modulo 2^128."""
    high, low = 0, 0
    for k in range(x.shape[0]):
        high, low = multiply_add_128(high, low, x[k], w[k])
    return high, low


@device_function
def add_bias(state, b):
    """Add one float32 pattern as a further term."""
    if is_special(b):
        count_special(state, b)
    else:
        add_integer(state, significand_of(b), exponent_of(b))


@device_function
def add_bias_128(high, low, exponent, b):
    """((high, low) * 2^exponent + bias) / 2^exponent and whether that is exact in 127 bits. Requires: |(high, low)| < 2^126."""
    if (b & 0x7FFFFFFF) == 0:
        return high, low, True
    shift = exponent_of(b) - exponent
    if is_special(b) or shift < 0 or shift > 101:
        return high, low, False
    significand = significand_of(b)
    term_high, term_low = shift_left_128(significand >> 63, significand, shift)
    high, low = add_128(high, low, term_high, term_low)
    return high, low, True


@kernel
def gemm_block(start, stop, x, w, x_integers, w_integers, x_low, w_low, x_width, w_width, limit, bias, out, significand_bits, exponent_bits):
    """out[i, j] = bits of the rounded sum over k of x[i, k] * w[j, k] + bias[j], for the rows of the block.

    Pairs of rows with x_width + w_width <= limit go through 128 bits. `bias` has N elements or none.
    """
    state = np.zeros(NB, np.int64)
    magnitude = np.zeros(MAGNITUDE_DIGITS, np.int64)
    biased = bias.shape[0] != 0
    for i in range(start, stop):
        for j in range(w.shape[0]):
            if x_width[i] + w_width[j] <= limit:
                exponent = x_low[i] + w_low[j]
                high, low = dot_128(x_integers[i], w_integers[j])
                fits = True
                sum_high, sum_low = high, low
                if biased:
                    sum_high, sum_low, fits = add_bias_128(high, low, exponent, np.int64(bias[j]))
                if fits:
                    out[i, j] = round_128(sum_high, sum_low, exponent, significand_bits, exponent_bits)
                    continue
                state[:] = 0
                add_integer_128(state, high, low, exponent)
            else:
                state[:] = 0
                dot_long(state, x[i], w[j])
            if biased:
                add_bias(state, np.int64(bias[j]))
            out[i, j] = round_state(state, magnitude, 1, significand_bits, exponent_bits)


@kernel
def gemm_digits_block(start, stop, x, w, x_integers, w_integers, x_low, w_low, x_width, w_width, limit, digits):
    """digits[i, j] += the canonical digits of the sum over k of x[i, k] * w[j, k], for the rows of the block."""
    state = np.zeros(NB, np.int64)
    for i in range(start, stop):
        for j in range(w.shape[0]):
            state[:] = 0
            if x_width[i] + w_width[j] <= limit:
                high, low = dot_128(x_integers[i], w_integers[j])
                add_integer_128(state, high, low, x_low[i] + w_low[j])
                carry_state(state)
            else:
                dot_long(state, x[i], w[j])
            for place in range(NB):
                digits[i, j, place] += state[place]


def _scan(bits: np.ndarray, engine: str):
    rows, terms = bits.shape
    if engine == "long_accumulator":
        return np.empty((rows, 0), np.int64), np.zeros(rows, np.int64), np.full(rows, WIDE, np.int64)
    integers, low, width = np.empty((rows, terms), np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    run_blocks(scan_rows, rows, 4 * rows * terms, bits, low, width, integers)
    return integers, low, width


def _operands(x: torch.Tensor, w: torch.Tensor, engine: str):
    x_bits, w_bits = float32_bits(x), float32_bits(w)
    x_integers, x_low, x_width = _scan(x_bits, engine)
    w_integers, w_low, w_width = _scan(w_bits, engine)
    # Ensures: K * 2^limit < 2^126.
    limit = 126 - x_bits.shape[1].bit_length()
    return x_bits, w_bits, x_integers, w_integers, x_low, w_low, x_width, w_width, limit


def gemm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, form: Format, engine: str) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, on checked arguments."""
    operands = _operands(x, w, engine)
    out = torch.empty((x.shape[0], w.shape[0]), dtype=torch.int32)
    bias_bits = _NO_BIAS if bias is None else float32_bits(bias)
    steps = x.shape[0] * w.shape[0] * (x.shape[1] + 16)
    run_blocks(
        gemm_block, x.shape[0], steps, *operands, bias_bits, out.numpy(), form.significand_bits, form.exponent_bits
    )
    return from_bits(out, form)


def add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous."""
    operands = _operands(x, w, engine)
    steps = x.shape[0] * w.shape[0] * (x.shape[1] + 64)
    run_blocks(gemm_digits_block, x.shape[0], steps, *operands, digits.numpy())
