"""The scan of a product's operands: rows as integers on a common power of two, with a bound of their norm.

A row that spans too many bits for one 64-bit integer an element is cut into bands of bits, each a row of integers:
row[k] = sum over t of band_t[k] * 2^(exponent + BAND_BITS t).
"""

import numpy as np

from ....arithmetic.formats import FLOAT32, FLOAT64
from .bands import BAND_BITS, LONG, MAXIMUM_BANDS, SCAN_PLACES
from .compiler import device_function, kernel
from .digits import LOWEST, exponent_of, significand_of
from .integers import bit_length, pattern_of_float
from .memory import integers_2, words_1
from .vectors import (
    add_in_any_order,
    float_of_float32_pattern,
    larger_word,
    lowest_place,
    magnitude_word,
    prefer_widest_vectors,
    smaller_word,
)

TILE = 1024
"""Elements that two loops in turn take: they stay in the first cache."""

_INFINITY = FLOAT32.infinity_bits
_SMALLEST_NORMAL = np.int32(1 << FLOAT32.fraction_bits)
_BIAS, _FRACTION_BITS = FLOAT64.top_exponent - 1, FLOAT64.fraction_bits


@device_function
def _extent(row_at, terms):
    """(place of the lowest bit set, largest magnitude, float64 sum of squares) of one row of float32 patterns.

    The sum is meant as a bound: it is within K 2^-52 of the true one, and numbers below the smallest normal one count
    as that, since a thread may be set to flush them.
    """
    lowest, most = np.int32(1 << 20), np.int32(0)
    squares = 0.0
    for tile in range((terms + TILE - 1) // TILE):
        size = min(TILE, terms - tile * TILE)
        words = words_1(row_at + 4 * tile * TILE, size)
        for k in range(size):
            lowest = smaller_word(lowest, lowest_place(words[k]))
            most = larger_word(most, magnitude_word(words[k]))
        for k in range(size):
            value = float_of_float32_pattern(larger_word(magnitude_word(words[k]), _SMALLEST_NORMAL))
            squares = add_in_any_order(squares, value * value)
    return np.int64(lowest), np.int64(most), squares


@device_function
def _norm(squares, exponent):
    """An upper bound of 16 * log2(sqrt(squares) / 2^exponent). Requires: squares > 0.

    With squares = 2^e (1 + f): 8 log2(squares) <= 8 (e + f) + 0.69 < 8 e + floor(8 f) + 1.7, and the rest up to 2 is
    room for the roundings of the sum.
    """
    pattern = pattern_of_float(squares)
    places = (pattern >> _FRACTION_BITS) - _BIAS
    return 8 * places + ((pattern >> (_FRACTION_BITS - 3)) & 7) + 2 - 16 * exponent


@kernel
def scan_rows(start, stop, terms, x_at, x_stride, x_rows, x_scan_at, w_at, w_stride, w_rows, w_scan_at):
    """Scan rows of two operands, x first: row[k] = integers[k] * 2^exponent with integers below 2^BAND_BITS.

    x: int32 [x_rows, K], w: int32 [w_rows, K], rows `*_stride` apart. A scan: int64, exponent [rows], norm [rows]. The
    norm is at least 16 * log2 of the Euclidean norm of the integers, so by Cauchy and Schwarz the sum of the products
    of two rows is at most 2^((norm + norm) / 16). Rows with infinities or NaNs, and rows wider than MAXIMUM_BANDS, have
    norm LONG; other rows of n > BAND_BITS bits have norm LONG + n. Returns 1 if there are any of these.
    """
    prefer_widest_vectors()
    banded = 0
    for row in range(start, stop):
        if row < x_rows:
            at, stride, rows, scan_at, i = x_at, x_stride, x_rows, x_scan_at, row
        else:
            at, stride, rows, scan_at, i = w_at, w_stride, w_rows, w_scan_at, row - x_rows
        scan = integers_2(scan_at, SCAN_PLACES, rows)
        lowest, most, squares = _extent(at + 4 * i * stride, terms)
        scan[0, i], scan[1, i] = 0, 0
        if most == 0:
            continue
        if most >= _INFINITY:
            scan[1, i] = LONG
            continue
        scan[0, i] = lowest + (LOWEST - 1)
        significand = abs(significand_of(most))
        width = exponent_of(most) + bit_length(significand) - scan[0, i]
        if width <= BAND_BITS:
            scan[1, i] = _norm(squares, scan[0, i])
        elif width <= MAXIMUM_BANDS * BAND_BITS:
            scan[1, i] = LONG + width
            banded = 1
        else:
            scan[1, i] = LONG
    return banded
