"""Integers rebuilt from sums of products of residues, a stretch of results at a time.

`arithmetic.residue.reconstruct`: v = sum over m of t[m] (P / p[m]) - P rint(sum of t[m] / p[m]). The moduli are taken in
groups with product Q: t[m] (P / p[m]) = t[m] (Q / p[m]) (P / Q), and the sum of t[m] (Q / p[m]) over a group is an
integer that float64 holds. So the loops over moduli work on eight results at once, and 128 bits are needed per group.
"""

from math import prod

import numpy as np

from ....arithmetic import residue, residue_int8
from .compiler import device_function
from .integers import multiply_add_wide
from .memory import words_1
from .vectors import floats_1, slice_of_floats

GROUPS = 3
STRETCH = 128
"""Results rebuilt at a time."""

PLACES = (GROUPS + 1) * STRETCH
"""float64 scratch for a stretch: per group the sums, then the sum of t / p."""

INT8, FLOAT64 = 0, 1
"""Engines: what the sums of `rebuild_stretch` are and which moduli they have."""

_DEFINITIONS = (residue_int8, residue)
_PER_GROUP = np.array([6, 2])
"""6 * 2^7 * 256^5 < 2^50 and 2 * 2^21 * 2^22 < 2^45."""

_MOST = residue_int8.MAXIMUM_MODULI
_ROUND = 6755399441055744.0
"""1.5 * 2^52: adding and subtracting it rounds a float64 below 2^51 to an integer."""


def halves(value: int) -> tuple[int, int]:
    """`value` modulo 2^128 as two int64 patterns, high first."""
    words = [value >> 64 & ((1 << 64) - 1), value & ((1 << 64) - 1)]
    return tuple(word - (1 << 64) if word >> 63 else word for word in words)


_MODULI, _INVERSES = np.zeros((2, _MOST)), np.zeros((2, _MOST))
_FACTORS = np.zeros((2, _MOST + 1, _MOST))
_WEIGHTS = np.zeros((2, _MOST + 1, GROUPS + 1, 2), np.int64)
for _engine, (_definition, _size) in enumerate(zip(_DEFINITIONS, _PER_GROUP, strict=True)):
    for _count in range(1, _definition.MAXIMUM_MODULI + 1):
        _chosen = _definition.moduli(_count)
        _MODULI[_engine, :_count], _INVERSES[_engine, :_count] = _chosen, [1 / p for p in _chosen]
        _WEIGHTS[_engine, _count, GROUPS] = halves(-prod(_chosen))
        for _group in range(-(-_count // _size)):
            _members = _chosen[_group * _size : (_group + 1) * _size]
            _WEIGHTS[_engine, _count, _group] = halves(prod(_chosen) // prod(_members))
            for _m, _p in enumerate(_members, _group * _size):
                _FACTORS[_engine, _count, _m] = prod(_members) // _p


@device_function
def reduce(value, modulus, inverse):
    """The integer `value` minus its nearest multiple of `modulus`, at most (modulus + 1) / 2 in magnitude, exactly.

    Requires: |value| + modulus < 2^53, so that the product and the difference are integers that float64 holds.
    """
    return value - ((value * inverse + _ROUND) - _ROUND) * modulus


@device_function
def rebuild_stretch(sums, row, column, size, parts):
    """Prepare results [row, column .. column + size - 1] in `parts`, float64 [PLACES].

    sums: (address, results a row, results a matrix, engine, count); there are `count` matrices, int32 for INT8 and
    float64 for FLOAT64.
    """
    at, row_size, matrix, engine, count = sums
    first = row * row_size + column
    for group in range(GROUPS + 1):
        totals = slice_of_floats(parts, group * STRETCH, STRETCH)
        for e in range(size):
            totals[e] = 0.0
    per_group = _PER_GROUP[engine]
    fractions = slice_of_floats(parts, GROUPS * STRETCH, STRETCH)
    for m in range(count):
        modulus, inverse, factor = _MODULI[engine, m], _INVERSES[engine, m], _FACTORS[engine, count, m]
        totals = slice_of_floats(parts, m // per_group * STRETCH, STRETCH)
        if engine == INT8:
            words = words_1(at + 4 * (m * matrix + first), size)
            for e in range(size):
                t = reduce(np.float64(words[e]), modulus, inverse)
                totals[e] += t * factor
                fractions[e] += t * inverse
        else:
            floats = floats_1(at + 8 * (m * matrix + first), size)
            for e in range(size):
                t = reduce(floats[e], modulus, inverse)
                totals[e] += t * factor
                fractions[e] += t * inverse


@device_function
def rebuilt(sums, parts, e):
    """Result e of a prepared stretch, modulo 2^128."""
    engine, count = sums[3], sums[4]
    multiple = np.int64((parts[GROUPS * STRETCH + e] + _ROUND) - _ROUND)
    high, low = multiply_add_wide(
        0, 0, multiple, _WEIGHTS[engine, count, GROUPS, 0], _WEIGHTS[engine, count, GROUPS, 1]
    )
    for group in range(GROUPS):
        high, low = multiply_add_wide(
            high, low, np.int64(parts[group * STRETCH + e]),
            _WEIGHTS[engine, count, group, 0], _WEIGHTS[engine, count, group, 1],
        )  # fmt: skip
    return high, low
