"""The scan of a product's operands: each row as integers on a common power of two, with a bound of their norm."""

import numpy as np

from .compiler import device_function, kernel
from .digits import exponent_of, is_special, significand_of
from .integers import bit_length, trailing_zeros
from .memory import integers_2, words_2

LARGEST_WIDTH = 62
"""Bits that a row may span to be held in 64-bit integers."""

UNBOUNDED = 1 << 20
"""The norm given to rows that are wider, and to rows with infinities or NaNs."""

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
def scan_row(bits, integers, terms):
    """Write the integers of one row; return (exponent, norm)."""
    lowest, highest = UNBOUNDED, -UNBOUNDED
    special = 0
    for k in range(terms):
        b = np.int64(bits[k])
        special |= is_special(b)
        significand = abs(significand_of(b))
        exponent = exponent_of(b)
        if significand != 0:
            lowest = min(lowest, exponent + trailing_zeros(significand))
            highest = max(highest, exponent)
    # One past the highest bit: at most 24 above the last place.
    width = highest + 24 - lowest
    if special or width > LARGEST_WIDTH or highest < lowest - 24:
        for k in range(terms):
            integers[k] = 0
        return 0, UNBOUNDED if special or width > LARGEST_WIDTH else 0
    # |x| >> cut is below 2^16, so the squares of 2^26 terms stay below 2^60.
    cut = max(width - 16, 0)
    squares = 0
    for k in range(terms):
        b = np.int64(bits[k])
        # A last place below `lowest` has only zeros between the two, so shifting down is exact.
        shift = exponent_of(b) - lowest
        value = (significand_of(b) << max(shift, 0)) >> min(max(-shift, 0), 63)
        integers[k] = value
        part = (abs(value) >> cut) + 1
        squares += part * part
    return lowest, norm_bound(squares, cut)


@kernel
def scan_rows(start, stop, terms, x_at, x_stride, x_rows, x_scan_at, w_at, w_stride, w_rows, w_scan_at):
    """Scan rows of two operands, x first: row[k] = integers[k] * 2^exponent exactly.

    x: int32 [x_rows, K], w: int32 [w_rows, K], rows `*_stride` apart. A scan: int64, exponent [rows], norm [rows],
    integers [rows, K]. The norm is at least 16 * log2 of the Euclidean norm of the integers, so by Cauchy and Schwarz
    the sum of the products of two rows is at most 2^((norm + norm) / 16). A row that spans more than LARGEST_WIDTH bits
    or is not finite has norm UNBOUNDED and zeros for integers.
    """
    for row in range(start, stop):
        if row < x_rows:
            at, stride, rows, scan_at, i = x_at, x_stride, x_rows, x_scan_at, row
        else:
            at, stride, rows, scan_at, i = w_at, w_stride, w_rows, w_scan_at, row - x_rows
        bits, scan = words_2(at, rows, stride), integers_2(scan_at, SCAN_PLACES, rows)
        integers = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms)
        scan[0, i], scan[1, i] = scan_row(bits[i], integers[i], terms)
