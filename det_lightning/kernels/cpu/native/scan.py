"""The scan of a product's operands: rows as integers on a common power of two, with a bound of their norm.

A row that spans too many bits for one 64-bit integer an element is cut into bands of bits, each a row of integers:
row[k] = sum over t of band_t[k] * 2^(exponent + BAND_BITS t).
"""

import numpy as np

from .compiler import device_function, kernel
from .digits import exponent_of, is_special, significand_of
from .integers import bit_length, trailing_zeros
from .memory import integers_1, integers_2, words_2

BAND_BITS = 54
"""Bits of one band: 2 * 54 + 16 < 126, so a sum over 2^16 terms of products of two bands fits 128 bits."""

MAXIMUM_BANDS = 4
"""Wider rows are left to the long accumulator."""

LONG = 1 << 20
"""The norm of a row that only the long accumulator takes; LONG + n is the norm of a row of n > BAND_BITS bits."""

SCAN_PLACES = 2
"""Per row a scan holds the exponent of the integers and their norm; then come the integers of all rows."""


@device_function
def norm_bound(squares, shift):
    """An upper bound of 16 * log2(2^shift * sqrt(squares)). Requires: 1 <= squares < 2^60.

    With squares = 2^e (1 + f): 8 log2(squares) <= 8 (e + f) + 0.69 <= 8 e + floor(8 f) + 2.
    """
    e = bit_length(squares) - 1
    return 16 * shift + 8 * e + (((squares << 3) >> e) & 7) + 2


@device_function
def extent(bits, terms):
    """(exponent of the lowest bit set, bits from there to the top) of one row; -1 bits if it holds a special value.

    The top is taken 24 places above the highest last place, which is exact but for rows of subnormals.
    """
    lowest, highest = LONG, -LONG
    special = 0
    for k in range(terms):
        b = np.int64(bits[k])
        special |= is_special(b)
        significand = abs(significand_of(b))
        if significand != 0:
            exponent = exponent_of(b)
            lowest = min(lowest, exponent + trailing_zeros(significand))
            highest = max(highest, exponent)
    if special:
        return 0, -1
    return (lowest, highest + 24 - lowest) if lowest != LONG else (0, 0)


@device_function
def fill_band(bits, integers, terms, lowest, width):
    """Write the bits lowest .. lowest + BAND_BITS - 1 of every element, with its sign; return the norm."""
    # |integer| >> cut is below 2^16, so the squares of 2^26 terms stay below 2^60.
    cut = max(min(width, BAND_BITS) - 16, 0)
    squares = 0
    for k in range(terms):
        b = np.int64(bits[k])
        shift = exponent_of(b) - lowest
        significand = abs(significand_of(b))
        # Above the band the shift wraps around and leaves zeros under the mask; below it, 24 places leave nothing.
        value = (significand << min(max(shift, 0), 63)) >> min(max(-shift, 0), 63)
        value &= (1 << BAND_BITS) - 1
        part = (value >> cut) + 1
        squares += part * part
        integers[k] = -value if b < 0 else value
    return norm_bound(squares, cut)


@kernel
def scan_rows(start, stop, terms, x_at, x_stride, x_rows, x_scan_at, w_at, w_stride, w_rows, w_scan_at):
    """Scan rows of two operands, x first: row[k] = integers[k] * 2^exponent exactly.

    x: int32 [x_rows, K], w: int32 [w_rows, K], rows `*_stride` apart. A scan: int64, exponent [rows], norm [rows],
    integers [rows, K]. The norm is at least 16 * log2 of the Euclidean norm of the integers, so by Cauchy and Schwarz
    the sum of the products of two rows is at most 2^((norm + norm) / 16). Rows with infinities or NaNs, and rows wider
    than MAXIMUM_BANDS, have norm LONG and zeros; other rows of n > BAND_BITS bits have norm LONG + n and zeros. Returns
    1 if there are any of these.
    """
    banded = 0
    for row in range(start, stop):
        if row < x_rows:
            at, stride, rows, scan_at, i = x_at, x_stride, x_rows, x_scan_at, row
        else:
            at, stride, rows, scan_at, i = w_at, w_stride, w_rows, w_scan_at, row - x_rows
        bits, scan = words_2(at, rows, stride)[i], integers_2(scan_at, SCAN_PLACES, rows)
        integers = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms)[i]
        lowest, width = extent(bits, terms)
        scan[0, i] = lowest
        if 0 <= width <= BAND_BITS:
            scan[1, i] = fill_band(bits, integers, terms, lowest, width)
            continue
        for k in range(terms):
            integers[k] = 0
        scan[1, i] = LONG
        if 0 < width <= MAXIMUM_BANDS * BAND_BITS:
            scan[1, i] = LONG + width
            banded = 1
    return banded


@kernel
def scan_bands(start, stop, terms, at, stride, rows, scan_at, first_at, bands, bands_at):
    """Rewrite a scan with one row for each band: rows first[i] .. first[i + 1] - 1 of the result belong to row i.

    at, stride, rows: the operand; scan: of it, by `scan_rows`; first: int64 [rows + 1]; result: a scan of `bands` rows.
    """
    operand, scan = words_2(at, rows, stride), integers_2(scan_at, SCAN_PLACES, rows)
    first, result = integers_1(first_at, rows + 1), integers_2(bands_at, SCAN_PLACES, bands)
    integers = integers_2(bands_at + 8 * SCAN_PLACES * bands, bands, terms)
    for i in range(start, stop):
        for t in range(first[i + 1] - first[i]):
            row = first[i] + t
            result[0, row] = scan[0, i] + BAND_BITS * t
            if scan[1, i] == LONG:
                result[1, row] = LONG
                for k in range(terms):
                    integers[row, k] = 0
            else:
                width = scan[1, i] - LONG - BAND_BITS * t if scan[1, i] > LONG else BAND_BITS
                result[1, row] = fill_band(operand[i], integers[row], terms, result[0, row], width)
