"""Residues of integers for float64 matrix products.

`arithmetic.residue` defines the moduli, the bounds and the reconstruction; the constants here are its numbers.
"""

import numpy as np

from ....arithmetic.residue import MAXIMUM_MODULI, balanced_residue, fold, moduli
from .bands import SCAN_PLACES, band_integer
from .compiler import device_function, kernel
from .memory import floats_2, integers_1, integers_2, words_1
from .rebuild import reduce

_MODULI = np.array(moduli(MAXIMUM_MODULI), np.float64)
_INVERSES = np.array([1 / p for p in moduli(MAXIMUM_MODULI)])
_HIGH_PARTS = np.array([balanced_residue(1 << 31, p) for p in moduli(MAXIMUM_MODULI)], np.float64)
_FOLDS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI))
for _n in range(1, MAXIMUM_MODULI + 1):
    _FOLDS[_n, :_n] = fold(_n)


@device_function
def residue_of(value, high_part, modulus, inverse):
    """The balanced residue of an integer below 2^62 as a float64: (high * 2^31 + low) mod p, both halves 32 bits wide.

    high * (2^31 mod p) + low stays below 2^31 * 2^21 + 2^31 < 2^53.
    """
    high, low = np.float64(np.int32(value >> 31)), np.float64(np.int32(value & 0x7FFFFFFF))
    return reduce(high * high_part + low, modulus, inverse)


@kernel
def residues_block(start, stop, terms, at, stride, rows_at, scan_at, bands, which, folded_count, out_at):
    """out[band, k] = the residue of the band's integers[k] modulo modulus `which`; out: float64 [bands, K].

    For bands start .. stop - 1; other arguments as for `residues_int8.int8_residues_block`.
    """
    rows, scan, out = (
        integers_1(rows_at, bands),
        integers_2(scan_at, SCAN_PLACES, bands),
        floats_2(out_at, bands, terms),
    )
    modulus, inverse, high_part = _MODULI[which], _INVERSES[which], _HIGH_PARTS[which]
    factor = _FOLDS[folded_count, which]
    for band in range(start, stop):
        lowest, target, words = scan[0, band], out[band], words_1(at + 4 * rows[band] * stride, terms)
        if folded_count == 0:
            for k in range(terms):
                target[k] = residue_of(band_integer(np.int64(words[k]), lowest), high_part, modulus, inverse)
        else:
            for k in range(terms):
                residue = residue_of(band_integer(np.int64(words[k]), lowest), high_part, modulus, inverse)
                target[k] = reduce(residue * factor, modulus, inverse)


@kernel
def reduce_block(start, stop, sums_at, columns, which):
    """Reduce float64 [rows, N] modulo modulus `which` in place, between two blocks of terms."""
    sums = floats_2(sums_at, stop, columns)
    modulus, inverse = _MODULI[which], _INVERSES[which]
    for i in range(start, stop):
        row = sums[i]
        for j in range(columns):
            row[j] = reduce(row[j], modulus, inverse)
