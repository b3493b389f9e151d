"""Residues of integers for float64 matrix products, and the integers rebuilt from their sums.

`arithmetic.residue` defines the moduli, the bounds and the reconstruction; the constants here are its numbers.
"""

from math import prod

import numpy as np

from ....arithmetic.residue import MAXIMUM_MODULI, balanced_residue, fold, moduli
from .compiler import device_function, kernel
from .integers import multiply_add_wide
from .memory import floats_2, integers_2
from .scan import SCAN_PLACES

_ROUND = 6755399441055744.0
"""1.5 * 2^52: adding and subtracting it rounds a float64 below 2^51 to an integer."""


def _halves(value: int) -> tuple[int, int]:
    """`value` modulo 2^128 as two int64 patterns, high first."""
    words = [value >> 64 & ((1 << 64) - 1), value & ((1 << 64) - 1)]
    return tuple(word - (1 << 64) if word >> 63 else word for word in words)


_MODULI = np.array(moduli(MAXIMUM_MODULI), np.float64)
_INVERSES = np.array([1 / p for p in moduli(MAXIMUM_MODULI)])
_HIGH_PARTS = np.array([balanced_residue(1 << 31, p) for p in moduli(MAXIMUM_MODULI)], np.float64)
_FOLDS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI))
_WEIGHTS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI, 2), np.int64)
_PRODUCTS = np.zeros((MAXIMUM_MODULI + 1, 2), np.int64)
for _n in range(1, MAXIMUM_MODULI + 1):
    _PRODUCTS[_n] = _halves(prod(moduli(_n)))
    for _m, (_p, _f) in enumerate(zip(moduli(_n), fold(_n), strict=True)):
        _FOLDS[_n, _m] = _f
        _WEIGHTS[_n, _m] = _halves(prod(moduli(_n)) // _p)


@device_function
def reduce(value, modulus, inverse):
    """The integer `value` minus its nearest multiple of `modulus`, at most (modulus + 1) / 2 in magnitude, exactly.

    Requires: |value| + modulus < 2^53, so that the product and the difference are integers that float64 holds.
    """
    return value - ((value * inverse + _ROUND) - _ROUND) * modulus


@device_function
def residue_of(value, high_part, modulus, inverse):
    """The balanced residue of an integer below 2^62 as a float64: (high * 2^31 + low) mod p, both halves 32 bits wide.

    high * (2^31 mod p) + low stays below 2^31 * 2^21 + 2^31 < 2^53.
    """
    high, low = np.float64(np.int32(value >> 31)), np.float64(np.int32(value & 0x7FFFFFFF))
    return reduce(high * high_part + low, modulus, inverse)


@kernel
def residues_block(start, stop, scan_at, rows, terms, which, folded_count, out_at):
    """out[i, k] = the residue of the scan's integers[i, k] modulo modulus `which`; out: float64 [rows, K].

    With `folded_count` > 0 it is the residue of integer * fold among that many moduli.
    """
    integers, out = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms), floats_2(out_at, rows, terms)
    modulus, inverse, high_part = _MODULI[which], _INVERSES[which], _HIGH_PARTS[which]
    factor = _FOLDS[folded_count, which]
    for i in range(start, stop):
        source, target = integers[i], out[i]
        if folded_count == 0:
            for k in range(terms):
                target[k] = residue_of(source[k], high_part, modulus, inverse)
        else:
            for k in range(terms):
                residue = residue_of(source[k], high_part, modulus, inverse)
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


@device_function
def rebuild(sums_at, rows, columns, i, j, count):
    """`arithmetic.residue.reconstruct` of sums[m, i, j] for m < count, modulo 2^128; sums: float64 [count, M, N].

    For count 0 the integers are ready: sums are int64 [M, N, 2], the high half first.
    """
    if count == 0:
        ready = integers_2(sums_at, rows * columns, 2)
        return ready[i * columns + j, 0], ready[i * columns + j, 1]
    sums = floats_2(sums_at, count * rows, columns)
    high, low = 0, 0
    fraction = 0.0
    for m in range(count):
        t = reduce(sums[m * rows + i, j], _MODULI[m], _INVERSES[m])
        fraction += t * _INVERSES[m]
        high, low = multiply_add_wide(high, low, np.int64(t), _WEIGHTS[count, m, 0], _WEIGHTS[count, m, 1])
    multiple = np.int64((fraction + _ROUND) - _ROUND)
    return multiply_add_wide(high, low, -multiple, _PRODUCTS[count, 0], _PRODUCTS[count, 1])
