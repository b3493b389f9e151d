"""Rows as integers: the bits of a row's elements on the power of two that its scan found, a band at a time."""

import numpy as np

from .compiler import device_function, kernel
from .digits import exponent_of, significand_of
from .memory import integers_1, integers_2, words_1

BAND_BITS = 54
"""Bits of one band: 2 * 54 + 16 < 126, so a sum over 2^16 terms of products of two bands fits 128 bits."""

MAXIMUM_BANDS = 4
"""Wider rows are left to the long accumulator."""

LONG = 1 << 20
"""The norm of a row that only the long accumulator takes; LONG + n is the norm of a row of n > BAND_BITS bits."""

SCAN_PLACES = 2
"""Per row a scan holds the exponent of the integers and their norm."""


@device_function
def band_integer(bits, lowest):
    """The bits lowest .. lowest + BAND_BITS - 1 of a finite float32 pattern as an integer, with its sign."""
    shift = exponent_of(bits) - lowest
    significand = abs(significand_of(bits))
    # Above the band the shift wraps around and leaves zeros under the mask; below it, 24 places leave nothing.
    value = (significand << min(max(shift, 0), 63)) >> min(max(-shift, 0), 63)
    value &= (1 << BAND_BITS) - 1
    return -value if bits < 0 else value


@kernel
def integers_block(start, stop, terms, at, stride, rows_at, scan_at, bands, out_at):
    """out[band, k] = the integers of bands start .. stop - 1; out: int64 [bands, K].

    at, stride: the operand; rows: int64 [bands], whose band it is; scan: of the bands. Bands of norm LONG are left as
    they are.
    """
    rows, scan, out = (
        integers_1(rows_at, bands),
        integers_2(scan_at, SCAN_PLACES, bands),
        integers_2(out_at, bands, terms),
    )
    for band in range(start, stop):
        if scan[1, band] >= LONG:
            continue
        lowest, target, words = scan[0, band], out[band], words_1(at + 4 * rows[band] * stride, terms)
        for k in range(terms):
            target[k] = band_integer(np.int64(words[k]), lowest)
