"""Exact sums of many terms at the speed of memory: float64 sums that hold every bit, a tile at a time.

The lowest and the highest exponent of a tile say how many bits its sum can have. If these are at most 53, float64 adds
without an error and in any order. If not, the terms are cut into bins: a bin takes from every term what lies above a
power of two, exactly, and leaves the rest to the next bin (after Rump, Ogita and Oishi, 2008; Demmel and Hida).
Tiles with infinities, NaNs or subnormal numbers go through the long accumulator term by term.
"""

import numpy as np

from ....arithmetic.formats import FLOAT32, FLOAT64, NB
from .compiler import device_function, kernel
from .digits import add_integer, carry_state, clear, exponent_of
from .integers import float_from_pattern
from .memory import integers_2, words_1
from .rounding import MASK
from .terms import add_product, add_term
from .vectors import (
    add_in_any_order,
    float_of_float32_pattern,
    larger_word,
    magnitude_word,
    one_less_word,
    smaller_unsigned_word,
    stack_floats,
)

TILE_BITS = 9
TILE = 1 << TILE_BITS
SUM, SQUARES, PRODUCTS = 0, 1, 2
"""What is summed: x[k], x[k]^2 or x[k] * w[k]."""

_INFINITY, _SIGNIFICAND_BITS = FLOAT32.infinity_bits, FLOAT32.significand_bits
_SMALLEST_NORMAL = 1 << FLOAT32.fraction_bits
_EXACT_BITS = FLOAT64.significand_bits
_BIAS, _FRACTION_BITS = FLOAT64.top_exponent - 1, FLOAT64.fraction_bits


@device_function
def _power_of_two(exponent):
    return float_from_pattern((exponent + _BIAS) << _FRACTION_BITS)


@device_function
def _extremes(words, size):
    """(smallest pattern that is not zero, largest pattern) of the magnitudes of a tile; (2^32, 0) for zeros alone."""
    # Zero less one is the largest unsigned word.
    least_less_one, most = np.int32(-1), np.int32(0)
    for t in range(size):
        magnitude = magnitude_word(words[t])
        most = larger_word(most, magnitude)
        least_less_one = smaller_unsigned_word(least_less_one, one_less_word(magnitude))
    return (np.int64(least_less_one) & MASK) + 1, np.int64(most)


@device_function
def _extremes_and_sum(words, size):
    """The extremes, and the float64 sum of a tile, which is exact if they say so and means nothing otherwise."""
    least, most = _extremes(words, size)
    total = 0.0
    # A loop of its own: together the compiler would take as few words at a time as there are float64 in a vector.
    for t in range(size):
        total = add_in_any_order(total, float_of_float32_pattern(words[t]))
    return least, most, total


@device_function
def _add_float(state, value, exponent):
    """state += value * 2^exponent. Requires: an integer |value| <= 2^53, exponent >= -298."""
    integer = np.int64(value)
    add_integer(state, integer & ((1 << 26) - 1), exponent)
    add_integer(state, integer >> 26, exponent + 26)


@device_function
def _add_tile(state, kind, x, w, size, tile):
    """state += the terms of x and w, int32 [size] each. A digit moves by less than 2^57."""
    if kind == SUM:
        least, most, total = _extremes_and_sum(x, size)
    else:
        least, most = _extremes(x, size)
        total = 0.0
    # Every term is a multiple of 2^low and smaller in magnitude than 2^high.
    low, high = exponent_of(least), exponent_of(most) + _SIGNIFICAND_BITS
    usual = most < _INFINITY and least >= _SMALLEST_NORMAL
    if kind == SQUARES:
        low, high = 2 * low, 2 * high
    if kind == PRODUCTS:
        other_least, other_most = _extremes(w, size)
        low, high = low + exponent_of(other_least), high + exponent_of(other_most) + _SIGNIFICAND_BITS
        usual = usual and other_most < _INFINITY and other_least >= _SMALLEST_NORMAL
    if not usual:
        for t in range(size):
            if kind == SUM:
                add_term(state, np.int64(x[t]))
            else:
                add_product(state, np.int64(x[t]), np.int64(w[t]))
        return
    if most == 0:
        return
    if kind == SUM and high - low + TILE_BITS <= _EXACT_BITS:
        _add_float(state, total * _power_of_two(-low), low)
        return
    for t in range(size):
        value = float_of_float32_pattern(x[t])
        if kind == SQUARES:
            value *= value
        if kind == PRODUCTS:
            value *= float_of_float32_pattern(w[t])
        tile[t] = value
    while True:
        # A bin of multiples of 2^unit: |sum| <= 2^(high + TILE_BITS) = 2^(unit + 53).
        unit = high + TILE_BITS - _EXACT_BITS
        total = 0.0
        if unit <= low:
            for t in range(size):
                total = add_in_any_order(total, tile[t])
            _add_float(state, total * _power_of_two(-low), low)
            return
        rounding = 1.5 * _power_of_two(unit + _FRACTION_BITS)
        for t in range(size):
            value = tile[t]
            cut = (value + rounding) - rounding
            tile[t] = value - cut
            total = add_in_any_order(total, cut)
        _add_float(state, total * _power_of_two(-unit), unit)
        # |rest| <= 2^(unit - 1), which is smaller than 2^unit.
        high = unit


@kernel
def sum_parts_block(start, stop, kind, x_at, w_at, length, parts, part_length, states_at):
    """states[i] = the sum of part i % parts of row i // parts of x: int32 [rows, length], canonical.

    `kind` is SUM, SQUARES or PRODUCTS; w: int32 like x, for SUM and SQUARES x itself. states: int64 [rows * parts, NB].
    """
    states, tile = integers_2(states_at, stop, NB), stack_floats(TILE)
    for i in range(start, stop):
        row, part = i // parts, i % parts
        start_term, end = part * part_length, min((part + 1) * part_length, length)
        clear(states[i])
        for number in range((end - start_term + TILE - 1) // TILE):
            first = start_term + number * TILE
            size, place = min(TILE, end - first), 4 * (row * length + first)
            _add_tile(states[i], kind, words_1(x_at + place, size), words_1(w_at + place, size), size, tile)
            # A tile moves a digit by at most 2^9 terms of 2^48, or by a few bins of 2^59.
            carry_state(states[i])
