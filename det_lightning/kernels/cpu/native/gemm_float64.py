"""The products of `native.gemm` through residues: float64 matrix products of integers below 2^53, then one rounding.

`arithmetic.residue` defines the moduli, the bounds and the reconstruction; the constants here are its numbers.
"""

from math import prod

import numpy as np

from ....arithmetic.formats import NB
from ....arithmetic.residue import MAXIMUM_MODULI, balanced_residue, fold, moduli
from .compiler import device_function, kernel
from .digits import add_integer_128, carry_state, clear
from .gemm import SCAN_PLACES, dot_128, dot_long, round_element, round_long
from .integers import multiply_add_wide
from .memory import floats_2, integers_2, stack_integers, words_1, words_2
from .rounding import MAGNITUDE_DIGITS

_ROUND = 6755399441055744.0
"""1.5 * 2^52: adding and subtracting it rounds a float64 below 2^51 to an integer."""


def _halves(value: int) -> tuple[int, int]:
    """`value` modulo 2^128 as two int64 patterns, high first."""
    words = [value >> 64 & ((1 << 64) - 1), value & ((1 << 64) - 1)]
    return tuple(word - (1 << 64) if word >> 63 else word for word in words)


_COUNTS = range(1, MAXIMUM_MODULI + 1)
_MODULI = np.array(moduli(MAXIMUM_MODULI), np.float64)
_INVERSES = np.array([1 / p for p in moduli(MAXIMUM_MODULI)])
_HIGH_PARTS = np.array([balanced_residue(1 << 31, p) for p in moduli(MAXIMUM_MODULI)], np.float64)
_FOLDS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI))
_WEIGHTS = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI, 2), np.int64)
_PRODUCTS = np.zeros((MAXIMUM_MODULI + 1, 2), np.int64)
for _n in _COUNTS:
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


@kernel
def residues_block(start, stop, scan_at, rows, terms, which, folded_count, out_at):
    """out[i, k] = the residue of the scan's integers[i, k] modulo modulus `which`; times its fold for `folded_count` > 0.

    out: float64 [rows, K]. An integer is high * 2^31 + low with both halves in 32 bits: high * (2^31 mod p) + low stays
    below 2^53.
    """
    integers, out = integers_2(scan_at + 8 * SCAN_PLACES * rows, rows, terms), floats_2(out_at, rows, terms)
    modulus, inverse, high_part = _MODULI[which], _INVERSES[which], _HIGH_PARTS[which]
    factor = _FOLDS[folded_count, which]
    for i in range(start, stop):
        if folded_count == 0:
            for k in range(terms):
                value = integers[i, k]
                high, low = np.float64(np.int32(value >> 31)), np.float64(np.int32(value & 0x7FFFFFFF))
                out[i, k] = reduce(high * high_part + low, modulus, inverse)
        else:
            for k in range(terms):
                value = integers[i, k]
                high, low = np.float64(np.int32(value >> 31)), np.float64(np.int32(value & 0x7FFFFFFF))
                residue = reduce(high * high_part + low, modulus, inverse)
                out[i, k] = reduce(residue * factor, modulus, inverse)


@kernel
def reduce_block(start, stop, sums_at, columns, which):
    """Reduce float64 [rows, N] modulo modulus `which` in place, between two blocks of terms."""
    sums = floats_2(sums_at, stop, columns)
    for i in range(start, stop):
        for j in range(columns):
            sums[i, j] = reduce(sums[i, j], _MODULI[which], _INVERSES[which])


@device_function
def rebuild(sums, row, plane, j, count):
    """`arithmetic.residue.reconstruct` of sums[m * plane + row, j] for m < count, modulo 2^128."""
    high, low = 0, 0
    fraction = 0.0
    for m in range(count):
        t = reduce(sums[m * plane + row, j], _MODULI[m], _INVERSES[m])
        fraction += t * _INVERSES[m]
        high, low = multiply_add_wide(high, low, np.int64(t), _WEIGHTS[count, m, 0], _WEIGHTS[count, m, 1])
    multiple = np.int64((fraction + _ROUND) - _ROUND)
    return multiply_add_wide(high, low, -multiple, _PRODUCTS[count, 0], _PRODUCTS[count, 1])


@kernel
def rebuild_block(start, stop, sums_at, count, capacity, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, rows, columns, terms, limit, bias_at, out_at, out_stride, significand_bits, exponent_bits):  # fmt: skip
    """`native.gemm.gemm_block`, with pairs of norm + norm <= capacity taken from sums: float64 [count, M, N]."""
    x, w, out = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride), words_2(out_at, rows, out_stride)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, rows), integers_2(w_scan_at, SCAN_PLACES, columns)
    x_integers = integers_2(x_scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 8 * SCAN_PLACES * columns, columns, terms)
    bias, sums = words_1(bias_at, columns), floats_2(sums_at, count * rows, columns)
    state, magnitude = stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)
    for i in range(start, stop):
        for j in range(columns):
            b = np.int64(bias[j]) if bias_at != 0 else 0
            norm = x_scan[1, i] + w_scan[1, j]
            if norm <= limit:
                if norm <= capacity:
                    high, low = rebuild(sums, i, rows, j, count)
                else:
                    high, low = dot_128(x_integers[i], w_integers[j], terms)
                exponent = x_scan[0, i] + w_scan[0, j]
                out[i, j] = round_element(high, low, exponent, b, state, magnitude, significand_bits, exponent_bits)
            else:
                out[i, j] = round_long(x[i], w[j], terms, b, state, magnitude, significand_bits, exponent_bits)


@kernel
def rebuild_digits_block(start, stop, sums_at, count, capacity, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, rows, columns, terms, limit, digits_at, digits_stride):  # fmt: skip
    """`native.gemm.gemm_digits_block`, with pairs of norm + norm <= capacity taken from sums: float64 [count, M, N]."""
    x, w = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride)
    digits = integers_2(digits_at, rows * digits_stride, NB)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, rows), integers_2(w_scan_at, SCAN_PLACES, columns)
    x_integers = integers_2(x_scan_at + 8 * SCAN_PLACES * rows, rows, terms)
    w_integers = integers_2(w_scan_at + 8 * SCAN_PLACES * columns, columns, terms)
    sums = floats_2(sums_at, count * rows, columns)
    state = stack_integers(NB)
    for i in range(start, stop):
        for j in range(columns):
            clear(state)
            norm = x_scan[1, i] + w_scan[1, j]
            if norm <= limit:
                if norm <= capacity:
                    high, low = rebuild(sums, i, rows, j, count)
                else:
                    high, low = dot_128(x_integers[i], w_integers[j], terms)
                add_integer_128(state, high, low, x_scan[0, i] + w_scan[0, j])
                carry_state(state)
            else:
                dot_long(state, x[i], w[j], terms)
            target = digits[i * digits_stride + j]
            for place in range(NB):
                target[place] += state[place]
