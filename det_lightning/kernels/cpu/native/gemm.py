"""Exact products of matrices: every element is one exact sum, kept as an integer until the one rounding.

Two ways to the same integer. A row whose bits span little becomes 64-bit integers on a common power of two, and a pair
of such rows is summed in 128 bits. Any other pair is summed product by product in a long accumulator.
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
from .integers import add_128, bit_length, multiply_add_128, shift_left_128, trailing_zeros
from .memory import integers_2, stack_integers, words_1, words_2
from .rounding import MAGNITUDE_DIGITS, round_128, round_state
WIDE = 1 << 20
"""The width given to rows that no 64-bit integers can hold, and to rows with infinities or NaNs."""

CARRY_TERMS = 1 << 14
"""Products between two carries of a long accumulator (see `add_integer`)."""


@kernel
def scan_rows(start, stop, bits_at, rows, terms, scan_at):
    """Per row of int32 [rows, K]: x[k] = integers[k] * 2^low with |integers[k]| < 2^width; width = WIDE if none fit.

    scan: int64, first low [rows], then width [rows], then integers [rows, K]. Widths up to 62 fit.
    """
    bits, scan = words_2(bits_at, rows, terms), integers_2(scan_at, 2, rows)
    integers = integers_2(scan_at + 16 * rows, rows, terms)
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
        scan[0, i] = lowest
        scan[1, i] = WIDE if special or highest - lowest > 62 else highest - lowest
        if scan[1, i] == WIDE:
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
def gemm_block(start, stop, x_at, w_at, x_scan_at, w_scan_at, rows, columns, terms, limit, bias_at, out_at, significand_bits, exponent_bits):
    """out[i, j] = bits of the rounded sum over k of x[i, k] * w[j, k] + bias[j], for the rows of the block.

    x: int32 [M, K], w: int32 [N, K], bias: int32 [N] or address 0, out: int32 [M, N]; scans as `scan_rows` wrote them.
    Pairs of rows with x_width + w_width <= limit go through 128 bits. Requires: K * 2^limit < 2^126.
    """
    x, w, out = words_2(x_at, rows, terms), words_2(w_at, columns, terms), words_2(out_at, rows, columns)
    x_scan, w_scan = integers_2(x_scan_at, 2, rows), integers_2(w_scan_at, 2, columns)
    x_integers = integers_2(x_scan_at + 16 * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 16 * columns, columns, terms)
    bias = words_1(bias_at, columns)
    state, magnitude = stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)
    for i in range(start, stop):
        for j in range(columns):
            b = np.int64(bias[j]) if bias_at != 0 else 0
            if x_scan[1, i] + w_scan[1, j] <= limit:
                exponent = x_scan[0, i] + w_scan[0, j]
                high, low = dot_128(x_integers[i], w_integers[j])
                sum_high, sum_low, fits = add_bias_128(high, low, exponent, b)
                if fits:
                    out[i, j] = round_128(sum_high, sum_low, exponent, significand_bits, exponent_bits)
                    continue
                clear(state)
                add_integer_128(state, high, low, exponent)
            else:
                clear(state)
                dot_long(state, x[i], w[j])
            add_bias(state, b)
            out[i, j] = round_state(state, magnitude, 1, significand_bits, exponent_bits)


@kernel
def gemm_digits_block(start, stop, x_at, w_at, x_scan_at, w_scan_at, rows, columns, terms, limit, digits_at):
    """digits[i, j] += the canonical digits of the sum over k of x[i, k] * w[j, k], for the rows of the block.

    digits: int64 [M * N, NB]; other arguments as for `gemm_block`.
    """
    x, w, digits = words_2(x_at, rows, terms), words_2(w_at, columns, terms), integers_2(digits_at, rows * columns, NB)
    x_scan, w_scan = integers_2(x_scan_at, 2, rows), integers_2(w_scan_at, 2, columns)
    x_integers = integers_2(x_scan_at + 16 * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 16 * columns, columns, terms)
    state = stack_integers(NB)
    for i in range(start, stop):
        for j in range(columns):
            clear(state)
            if x_scan[1, i] + w_scan[1, j] <= limit:
                high, low = dot_128(x_integers[i], w_integers[j])
                add_integer_128(state, high, low, x_scan[0, i] + w_scan[0, j])
                carry_state(state)
            else:
                dot_long(state, x[i], w[j])
            for place in range(NB):
                digits[i * columns + j, place] += state[place]
