"""Exact sums along one axis, and sums of squares."""

import numpy as np

from ....arithmetic.formats import NB
from .compiler import device_function, kernel
from .digits import (
    add_integer,
    carry_state,
    count_special,
    count_special_product,
    exponent_of,
    is_special,
    significand_of,
)
from .memory import integers_2, words_1

CARRY_TERMS = 1 << 14
"""Terms between two carries (see `add_integer`)."""


@device_function
def add_term(state, b):
    """state += the value of one float32 pattern."""
    if is_special(b):
        count_special(state, b)
    else:
        add_integer(state, significand_of(b), exponent_of(b))


@kernel
def sum_block(start, stop, bits_at, states_at, inner, outer_stride, length):
    """states[i] = the sum over k of bits[outer * outer_stride + k * inner + column], where i = outer * inner + column.

    bits: int32, states: zeros int64 [n, NB], left canonical.
    """
    states = integers_2(states_at, stop, NB)
    for i in range(start, stop):
        outer, column = i // inner, i % inner
        bits = words_1(bits_at + 4 * (outer * outer_stride + column), length * inner)
        for k in range(length):
            add_term(states[i], np.int64(bits[k * inner]))
            if k % CARRY_TERMS == CARRY_TERMS - 1:
                carry_state(states[i])
        carry_state(states[i])


@kernel
def sum_of_squares_block(start, stop, bits_at, states_at, length, total):
    """states[i] = the sum of the squares of the elements from i * length to (i + 1) * length, or to `total`.

    bits: int32 [total], states: zeros int64 [n, NB], left canonical.
    """
    bits, states = words_1(bits_at, total), integers_2(states_at, stop, NB)
    for i in range(start, stop):
        for k in range(i * length, min((i + 1) * length, total)):
            b = np.int64(bits[k])
            if is_special(b):
                count_special_product(states[i], b, b)
            else:
                value = significand_of(b)
                add_integer(states[i], value * value, 2 * exponent_of(b))
            if k % CARRY_TERMS == CARRY_TERMS - 1:
                carry_state(states[i])
        carry_state(states[i])
