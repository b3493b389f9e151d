"""Exact products of matrices: every element is one exact sum, kept as an integer until the one rounding.

Three ways to the same integer. A row whose bits span little becomes 64-bit integers on a common power of two; the sum
over a pair of such rows is rebuilt from residues where these were computed (`native.residues`), or taken in 128 bits.
Any other pair is summed product by product in a long accumulator.
"""

import numpy as np

from ....arithmetic.formats import NB
from .compiler import device_function, kernel
from .digits import (
    add_integer,
    add_integer_128,
    carry_state,
    clear,
    count_special,
    count_special_product,
    exponent_of,
    is_special,
    significand_of,
)
from .integers import add_128, multiply_add_128, shift_left_128
from .memory import integers_2, stack_integers, words_1, words_2
from .residues import rebuild
from .rounding import MAGNITUDE_DIGITS, round_128, round_state
from .scan import SCAN_PLACES

LIMIT = 16 * 126
"""Norms of two rows, in sixteenths of a bit, may add up to this for a sum in 128 bits."""

CARRY_TERMS = 1 << 14
"""Products between two carries of a long accumulator (see `add_integer`)."""


@device_function
def dot_long(state, x, w, terms):
    """state += sum over k of x[k] * w[k], for any float32 patterns. Leaves the state canonical."""
    pending = 0
    for k in range(terms):
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
def dot_128(x, w, terms):
    """The sum over k of x[k] * w[k], modulo 2^128."""
    high, low = 0, 0
    for k in range(terms):
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
    """(high, low) + bias / 2^exponent, and whether that is an integer of 127 bits. Requires: |(high, low)| <= 2^126."""
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
def gemm_block(
    start, stop, rows, columns, terms, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, engine_limit,
    sums_at, count, capacity, bias_at, out_at, out_stride, significand_bits, exponent_bits,
):  # fmt: skip
    """out[i, j] = bits of the rounded sum over k of x[i, k] * w[j, k] + bias[j], for the rows of the block.

    x: int32 [M, K], w: int32 [N, K], out: int32 [M, N], rows `*_stride` apart; bias: int32 [N] or address 0; scans as
    `scan_rows` wrote them; sums as `native.residues.rebuild` reads them. A pair of rows whose norms add up to at most
    `capacity` is rebuilt from residues, one with at most `engine_limit` <= LIMIT goes through 128 bits.
    """
    x, w, out = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride), words_2(out_at, rows, out_stride)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, rows), integers_2(w_scan_at, SCAN_PLACES, columns)
    x_integers = integers_2(x_scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 8 * SCAN_PLACES * columns, columns, terms)
    bias = words_1(bias_at, columns)
    state, magnitude = stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)
    for i in range(start, stop):
        for j in range(columns):
            b = np.int64(bias[j]) if bias_at != 0 else 0
            norm, exponent = x_scan[1, i] + w_scan[1, j], x_scan[0, i] + w_scan[0, j]
            if norm <= engine_limit:
                if norm <= capacity:
                    high, low = rebuild(sums_at, rows, columns, i, j, count)
                else:
                    high, low = dot_128(x_integers[i], w_integers[j], terms)
                sum_high, sum_low, fits = add_bias_128(high, low, exponent, b)
                if fits:
                    out[i, j] = round_128(sum_high, sum_low, exponent, significand_bits, exponent_bits)
                    continue
                clear(state)
                add_integer_128(state, high, low, exponent)
            else:
                clear(state)
                dot_long(state, x[i], w[j], terms)
            add_bias(state, b)
            out[i, j] = round_state(state, magnitude, 1, significand_bits, exponent_bits)


@kernel
def gemm_digits_block(
    start, stop, rows, columns, terms, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, engine_limit,
    sums_at, count, capacity, digits_at, digits_stride,
):  # fmt: skip
    """digits[i, j] += the canonical digits of the sum over k of x[i, k] * w[j, k], for the rows of the block.

    digits: int64 [M, N, NB], rows `digits_stride` elements of NB apart; other arguments as for `gemm_block`.
    """
    x, w = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride)
    digits = integers_2(digits_at, rows * digits_stride, NB)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, rows), integers_2(w_scan_at, SCAN_PLACES, columns)
    x_integers = integers_2(x_scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 8 * SCAN_PLACES * columns, columns, terms)
    state = stack_integers(NB)
    for i in range(start, stop):
        for j in range(columns):
            clear(state)
            norm, exponent = x_scan[1, i] + w_scan[1, j], x_scan[0, i] + w_scan[0, j]
            if norm <= engine_limit:
                if norm <= capacity:
                    high, low = rebuild(sums_at, rows, columns, i, j, count)
                else:
                    high, low = dot_128(x_integers[i], w_integers[j], terms)
                add_integer_128(state, high, low, exponent)
                carry_state(state)
            else:
                dot_long(state, x[i], w[j], terms)
            target = digits[i * digits_stride + j]
            for place in range(NB):
                target[place] += state[place]
