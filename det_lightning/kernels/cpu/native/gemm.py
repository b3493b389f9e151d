"""Exact products of matrices: every element is one exact sum, kept as an integer until the one rounding.

Two ways to the same integer. A row whose bits span little becomes 64-bit integers on a common power of two, and the
sum over a pair of such rows is taken in 128 bits. Any other pair is summed product by product in a long accumulator.
`native.gemm_float64` adds a third way, through residues.
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

LARGEST_WIDTH = 62
"""Bits that a row may span to be held in 64-bit integers."""

UNBOUNDED = 1 << 20
"""The norm given to rows that are wider, and to rows with infinities or NaNs."""

SCAN_PLACES = 2
"""Per row a scan holds the exponent of the integers, their norm, and then the integers themselves."""

CARRY_TERMS = 1 << 14
"""Products between two carries of a long accumulator (see `add_integer`)."""


@device_function
def norm_bound(squares, shift):
    """An upper bound of 16 * log2(2^shift * sqrt(squares)), squares >= 1.

    With squares = 2^e (1 + f): 8 log2(squares) <= 8 (e + f) + 0.69 <= 8 e + floor(8 f) + 2.
    """
    e = bit_length(squares) - 1
    eighths = (squares << 3 >> e) & 7 if e < 60 else (squares >> (e - 3)) & 7
    return 16 * shift + 8 * e + eighths + 2


@kernel
def scan_rows(start, stop, bits_at, rows, terms, stride, scan_at):
    """Per row of int32 [rows, K] (rows `stride` apart): x[k] = integers[k] * 2^low exactly.

    scan: int64, low [rows], norm [rows], integers [rows, K]. The norm is at least 16 * log2 of the Euclidean norm of
    the integers, so by Cauchy and Schwarz a sum of products of two rows is at most 2^((norm + norm) / 16).
    A row that spans more than LARGEST_WIDTH bits or is not finite has norm UNBOUNDED and zeros for integers.
    """
    bits, scan = words_2(bits_at, rows, stride), integers_2(scan_at, SCAN_PLACES, rows)
    integers = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    for i in range(start, stop):
        lowest, highest = UNBOUNDED, -UNBOUNDED
        special = False
        for k in range(terms):
            b = np.int64(bits[i, k])
            special = special or is_special(b)
            significand = abs(significand_of(b))
            if significand != 0:
                exponent = exponent_of(b)
                lowest = min(lowest, exponent + trailing_zeros(significand))
                highest = max(highest, exponent + bit_length(significand))
        scan[0, i], scan[1, i] = 0, 0
        if special or highest - lowest > LARGEST_WIDTH or highest < lowest:
            if special or highest > lowest:
                scan[1, i] = UNBOUNDED
            for k in range(terms):
                integers[i, k] = 0
            continue
        # |x| >> cut is below 2^16, so the squares of 2^30 terms fit.
        cut = max(highest - lowest - 16, 0)
        squares = 0
        for k in range(terms):
            b = np.int64(bits[i, k])
            shift = exponent_of(b) - lowest
            significand = significand_of(b)
            value = significand << shift if shift >= 0 else significand >> min(-shift, 63)
            integers[i, k] = value
            if value != 0:
                part = (abs(value) >> cut) + 1
                squares += part * part
        scan[0, i], scan[1, i] = lowest, norm_bound(squares, cut)


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
    """((high, low) * 2^exponent + bias) / 2^exponent, and whether 127 bits hold it. Requires: |(high, low)| <= 2^126."""
    if (b & 0x7FFFFFFF) == 0:
        return high, low, True
    shift = exponent_of(b) - exponent
    if is_special(b) or shift < 0 or shift > 101:
        return high, low, False
    significand = significand_of(b)
    term_high, term_low = shift_left_128(significand >> 63, significand, shift)
    high, low = add_128(high, low, term_high, term_low)
    return high, low, True


@device_function
def round_element(high, low, exponent, b, state, magnitude, significand_bits, exponent_bits):
    """Bits of (high, low) * 2^exponent + bias, rounded once. Requires: |(high, low)| <= 2^126."""
    sum_high, sum_low, fits = add_bias_128(high, low, exponent, b)
    if fits:
        return round_128(sum_high, sum_low, exponent, significand_bits, exponent_bits)
    clear(state)
    add_integer_128(state, high, low, exponent)
    add_bias(state, b)
    return round_state(state, magnitude, 1, significand_bits, exponent_bits)


@device_function
def round_long(x, w, terms, b, state, magnitude, significand_bits, exponent_bits):
    """Bits of the sum over k of x[k] * w[k] + bias, rounded once, for any float32 patterns."""
    clear(state)
    dot_long(state, x, w, terms)
    add_bias(state, b)
    return round_state(state, magnitude, 1, significand_bits, exponent_bits)


@kernel
def gemm_block(start, stop, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, rows, columns, terms, limit, bias_at, out_at, out_stride, significand_bits, exponent_bits):  # fmt: skip
    """out[i, j] = bits of the rounded sum over k of x[i, k] * w[j, k] + bias[j], for the rows of the block.

    x: int32 [M, K], w: int32 [N, K], out: int32 [M, N], rows `*_stride` apart; bias: int32 [N] or address 0; scans as
    `scan_rows` wrote them. Pairs of rows with norm + norm <= limit go through 128 bits. Requires: limit <= 16 * 126.
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
            if x_scan[1, i] + w_scan[1, j] <= limit:
                high, low = dot_128(x_integers[i], w_integers[j], terms)
                exponent = x_scan[0, i] + w_scan[0, j]
                out[i, j] = round_element(high, low, exponent, b, state, magnitude, significand_bits, exponent_bits)
            else:
                out[i, j] = round_long(x[i], w[j], terms, b, state, magnitude, significand_bits, exponent_bits)


@kernel
def gemm_digits_block(start, stop, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, rows, columns, terms, limit, digits_at, digits_stride):  # fmt: skip
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
            if x_scan[1, i] + w_scan[1, j] <= limit:
                high, low = dot_128(x_integers[i], w_integers[j], terms)
                add_integer_128(state, high, low, x_scan[0, i] + w_scan[0, j])
                carry_state(state)
            else:
                dot_long(state, x[i], w[j], terms)
            target = digits[i * digits_stride + j]
            for place in range(NB):
                target[place] += state[place]
