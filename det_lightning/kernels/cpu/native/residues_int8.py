"""Residues of integers for int8 matrix products, and the integers rebuilt from their int32 sums.

`arithmetic.residue_int8` defines the moduli, the bounds and the reconstruction; the constants here are its numbers.
"""

from math import prod

import numpy as np

from ....arithmetic.residue import balanced_residue
from ....arithmetic.residue_int8 import MAXIMUM_MODULI, fold, moduli
from .compiler import kernel
from .integers import multiply_add_wide
from .memory import integers_2, words_1
from .residues import _ROUND, _halves, reduce, residue_of
from .scan import SCAN_PLACES
from .vectors import bytes_1

_MODULI = np.array(moduli(MAXIMUM_MODULI), np.float64)
_INVERSES = np.array([1 / p for p in moduli(MAXIMUM_MODULI)])
_HIGH_PARTS = np.array([balanced_residue(1 << 31, p) for p in moduli(MAXIMUM_MODULI)], np.float64)
_FOLDS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI))
_WEIGHTS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI, 2), np.int64)
_PRODUCTS = np.zeros((MAXIMUM_MODULI + 1, 2), np.int64)
for _n in range(1, MAXIMUM_MODULI + 1):
    _PRODUCTS[_n] = _halves(prod(moduli(_n)) % (1 << 128))
    for _m, (_p, _f) in enumerate(zip(moduli(_n), fold(_n), strict=True)):
        _FOLDS[_n, _m] = _f
        _WEIGHTS[_n, _m] = _halves(prod(moduli(_n)) // _p)


@kernel
def int8_residues_block(start, stop, scan_at, rows, terms, count, folded, out_at):
    """out[m, i, k] = the residue of the scan's integers[i, k] modulo modulus m < count; out: int8 [count, rows, K].

    `folded` says whether it is the residue of integer * fold.
    """
    integers = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    for i in range(start, stop):
        source = integers[i]
        for m in range(count):
            target = bytes_1(out_at + (m * rows + i) * terms, terms)
            modulus, inverse, high_part, factor = _MODULI[m], _INVERSES[m], _HIGH_PARTS[m], _FOLDS[count, m]
            if folded == 0:
                for k in range(terms):
                    target[k] = np.int8(np.int32(residue_of(source[k], high_part, modulus, inverse)))
            else:
                for k in range(terms):
                    residue = residue_of(source[k], high_part, modulus, inverse)
                    target[k] = np.int8(np.int32(reduce(residue * factor, modulus, inverse)))


@kernel
def int8_rebuild_block(start, stop, sums_at, elements, count, out_at):
    """out[e] = `arithmetic.residue_int8.reconstruct` of sums[m, e] for m < count, modulo 2^128.

    sums: int32 [count, elements], out: int64 [elements, 2], the high half first.
    """
    out = integers_2(out_at, elements, 2)
    for e in range(start, stop):
        high, low = 0, 0
        fraction = 0.0
        for m in range(count):
            sums = words_1(sums_at + 4 * m * elements, elements)
            t = reduce(np.float64(sums[e]), _MODULI[m], _INVERSES[m])
            fraction += t * _INVERSES[m]
            high, low = multiply_add_wide(high, low, np.int64(t), _WEIGHTS[count, m, 0], _WEIGHTS[count, m, 1])
        multiple = np.int64((fraction + _ROUND) - _ROUND)
        out[e, 0], out[e, 1] = multiply_add_wide(high, low, -multiple, _PRODUCTS[count, 0], _PRODUCTS[count, 1])
