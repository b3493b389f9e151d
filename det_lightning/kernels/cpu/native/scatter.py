"""Exact sums of rows that share an index: grouping by counting, then one long accumulator an element."""

import numpy as np

from ....arithmetic.formats import FLOAT32, NB
from .compiler import device_function, kernel
from .digits import carry_state, clear
from .memory import integers_1, integers_2, stack_integers, words_1, words_2
from .rounding import MAGNITUDE_DIGITS, round_state
from .terms import CARRY_TERMS, add_term

_INFINITY, _NAN, _SIGNIFICAND_BITS = FLOAT32.infinity_bits, FLOAT32.nan_bits, FLOAT32.significand_bits


@kernel
def group_block(start, stop, index_at, groups, offsets_at, order_at):
    """Group the sources start..stop by index: those of group g become order[offsets[g] : offsets[g + 1]].

    index: int64 [sources] in [0, groups); offsets: zeros int64 [groups + 2]; order: int64 [sources]. One call groups
    all: the blocks of one array cannot be grouped apart.
    """
    index, offsets, order = integers_1(index_at, stop), integers_1(offsets_at, groups + 2), integers_1(order_at, stop)
    # offsets[g + 2] counts group g; summed up, offsets[g + 1] is its start, and after filling its end.
    for i in range(start, stop):
        offsets[index[i] + 2] += 1
    for g in range(2, groups + 2):
        offsets[g] += offsets[g - 1]
    for i in range(start, stop):
        place = index[i] + 1
        order[offsets[place]] = i
        offsets[place] += 1


@device_function
def sum_group(state, source, order, first, last, column):
    """state = the sum of source[order[k], column] over first <= k < last, canonical."""
    clear(state)
    for k in range(first, last):
        add_term(state, np.int64(source[order[k], column]))
        if (k - first) % CARRY_TERMS == CARRY_TERMS - 1:
            carry_state(state)
    carry_state(state)


@kernel
def add_groups_block(start, stop, source_at, sources, columns, parts, part_columns, offsets_at, order_at, digits_at):
    """digits[g, c] += the canonical digits of the sum of group g; block i is part i % parts of group i // parts.

    source: int32 [sources, columns], digits: int64 [groups * columns, NB].
    """
    source, order = words_2(source_at, sources, columns), integers_1(order_at, sources)
    offsets = integers_1(offsets_at, stop // parts + 2)
    state = stack_integers(NB)
    for i in range(start, stop):
        group, part = i // parts, i % parts
        first, last = offsets[group], offsets[group + 1]
        if first == last:
            continue
        digits = integers_2(digits_at + 8 * NB * group * columns, columns, NB)
        for column in range(part * part_columns, min((part + 1) * part_columns, columns)):
            sum_group(state, source, order, first, last, column)
            for place in range(NB):
                digits[column, place] += state[place]


@device_function
def _canonical(b):
    """The pattern of a float32 as a sum of that one term: no negative zero, one NaN."""
    absolute = b & 0x7FFFFFFF
    if absolute > _INFINITY:
        return _NAN
    return b if absolute != 0 else 0


@kernel
def round_groups_block(
    start, stop, source_at, sources, columns, parts, part_columns, offsets_at, order_at, more_at, out_at,
    significand_bits, exponent_bits,
):  # fmt: skip
    """out[g, c] = bits of more[g, c] + the sum of group g, rounded once; more: int32 like out, or address 0."""
    source, order = words_2(source_at, sources, columns), integers_1(order_at, sources)
    offsets = integers_1(offsets_at, stop // parts + 2)
    state, magnitude = stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)
    for i in range(start, stop):
        group, part = i // parts, i % parts
        first, last = offsets[group], offsets[group + 1]
        more, out = words_1(more_at + 4 * group * columns, columns), words_1(out_at + 4 * group * columns, columns)
        terms = last - first + (1 if more_at != 0 else 0)
        for column in range(part * part_columns, min((part + 1) * part_columns, columns)):
            if terms == 0:
                out[column] = np.int32(0)
            elif terms == 1 and significand_bits == _SIGNIFICAND_BITS:
                b = np.int64(more[column]) if more_at != 0 else np.int64(source[order[first], column])
                out[column] = np.int32(_canonical(b))
            else:
                sum_group(state, source, order, first, last, column)
                if more_at != 0:
                    add_term(state, np.int64(more[column]))
                out[column] = np.int32(round_state(state, magnitude, 1, significand_bits, exponent_bits))
