"""Exact sums along one axis, and sums of squares.

A long sum first adds the significands of each exponent field together: one addition a term, one shift a field.
"""

import numpy as np

from ....arithmetic.formats import NB
from .compiler import device_function, kernel
from .digits import (
    EXPONENT_MASK,
    LOWEST,
    add_integer,
    add_integer_128,
    carry_state,
    count_special,
    exponent_of,
    field_of,
    is_special,
    significand_of,
)
from .memory import integers_2, stack_integers, words_1

FIELDS = EXPONENT_MASK + 1
"""Exponent fields of float32; the last one marks special values."""

FEW_TERMS = 96
"""Below this many terms adding each one to the state is quicker than clearing and folding all fields."""

FLUSH_TERMS = 1 << 14
"""Terms between two folds: 2^14 squares below 2^48 stay below 2^62."""


@device_function
def fold_fields(state, fields, power):
    """state += sum over f of fields[f] * 2^(power * exponent of f); clear the fields. Leaves the state canonical."""
    for f in range(FIELDS - 1):
        value = fields[f]
        if value != 0:
            add_integer_128(state, value >> 63, value, power * (LOWEST + max(f, 1) - 1))
            fields[f] = 0
    carry_state(state)


@device_function
def add_few(state, bits, length, step):
    """state += the sum over k of bits[k * step]. Leaves the state canonical. Requires: length <= 2^14."""
    for k in range(length):
        b = np.int64(bits[k * step])
        if is_special(b):
            count_special(state, b)
        else:
            add_integer(state, significand_of(b), exponent_of(b))
    carry_state(state)


@device_function
def add_many(state, fields, bits, length, step):
    """state += the sum over k of bits[k * step], through zero `fields`, which are left zero."""
    special = 0
    for k in range(length):
        b = np.int64(bits[k * step])
        field = field_of(b)
        special |= field == EXPONENT_MASK
        fields[field] += significand_of(b)
        if k % FLUSH_TERMS == FLUSH_TERMS - 1:
            fold_fields(state, fields, 1)
    fold_fields(state, fields, 1)
    fields[FIELDS - 1] = 0
    if special:
        for k in range(length):
            b = np.int64(bits[k * step])
            if is_special(b):
                count_special(state, b)


@kernel
def sum_block(start, stop, bits_at, states_at, inner, outer_stride, length):
    """states[i] = the sum over k of bits[outer * outer_stride + k * inner + column], where i = outer * inner + column.

    bits: int32, states: zeros int64 [n, NB], left canonical.
    """
    states, fields = integers_2(states_at, stop, NB), stack_integers(FIELDS)
    for f in range(FIELDS):
        fields[f] = 0
    for i in range(start, stop):
        outer, column = i // inner, i % inner
        bits = words_1(bits_at + 4 * (outer * outer_stride + column), length * inner)
        if length < FEW_TERMS:
            add_few(states[i], bits, length, inner)
        else:
            add_many(states[i], fields, bits, length, inner)
