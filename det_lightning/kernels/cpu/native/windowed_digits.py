"""Kernels on windowed digits (`arithmetic.windowed_digits`): from and to full states, carrying, growing.

Words are int32 [count, elements]: one plane a word, planes `plane` elements apart. Element e has base bases[e // columns].
"""

import numpy as np

from ....arithmetic.formats import DIGITS, LOWEST_EXPONENT, NB
from ....arithmetic.windowed_digits import NOTHING, WORD_BITS
from .compiler import device_function, kernel
from .digits import carry_state
from .integers import bit_length, trailing_zeros
from .memory import integers_1, integers_2, stack_integers, words_1
from .rounding import MASK

_RADIX = 1 << WORD_BITS
_HALF = _RADIX >> 1


@device_function
def _digit(state, j):
    """32 bits of a canonical state in two's complement, the sign continued without end."""
    if j < DIGITS - 1:
        return state[j]
    top = state[DIGITS - 1]
    if j == DIGITS - 1:
        return top & MASK
    if j == DIGITS:
        return (top >> 32) & MASK
    return (top >> 63) & MASK


@device_function
def _copy_canonical(source, state):
    for j in range(NB):
        state[j] = source[j]
    carry_state(state)


@kernel
def bounds_block(start, stop, states_at, columns, parts, part_columns, low_at, high_at):
    """Bounds of the values in part i % parts of row i // parts: multiples of 2^low, smaller in magnitude than 2^high.

    states: int64 [rows * columns, NB], any state; low, high: int64 [rows * parts]. Zeros alone give NOTHING, -NOTHING.
    """
    low, high = integers_1(low_at, stop), integers_1(high_at, stop)
    state = stack_integers(NB)
    for i in range(start, stop):
        row, part = i // parts, i % parts
        first, last = part * part_columns, min((part + 1) * part_columns, columns)
        states = integers_2(states_at + 8 * NB * row * columns, columns, NB)
        lowest, highest = NOTHING, -NOTHING
        for e in range(first, last):
            _copy_canonical(states[e], state)
            j = 0
            while j < DIGITS and state[j] == 0:
                j += 1
            if j == DIGITS:
                continue
            lowest = min(lowest, LOWEST_EXPONENT + 32 * j + trailing_zeros(state[j]))
            top = state[DIGITS - 1]
            sign = (top >> 63) & MASK
            # Two's complement: |value| < 2^(place of the highest bit that differs from the sign, plus one) or equal.
            length = bit_length(top ^ (top >> 63))
            k = DIGITS - 1
            while length == 0 and k > 0:
                k -= 1
                length = bit_length(state[k] ^ sign)
            extra = 1 if sign != 0 else 0
            highest = max(highest, LOWEST_EXPONENT + 32 * k + length + extra)
        low[i], high[i] = lowest, highest


@kernel
def from_states_block(start, stop, states_at, columns, bases_at, words_at, plane, count, misfits_at):
    """words = the values of states: int64 [elements, NB], any state. misfits[0] becomes 1 if one lies outside the window."""
    states, bases = integers_2(states_at, stop, NB), integers_1(bases_at, stop // columns + 1)
    words, misfits = words_1(words_at, plane * count), integers_1(misfits_at, 1)
    state = stack_integers(NB)
    for e in range(start, stop):
        _copy_canonical(states[e], state)
        place = bases[e // columns] - LOWEST_EXPONENT
        j, r = place >> 5, place & 31
        below = state[j] & ((1 << r) - 1) if j < DIGITS else 0
        for k in range(min(j, DIGITS)):
            below |= state[k]
        carry = 0
        for word in range(count):
            field = (((_digit(state, j + 1) << 32) | _digit(state, j)) >> r) & (_RADIX - 1)
            field += carry
            carry = 1 if field >= _HALF else 0
            words[word * plane + e] = np.int32(field - (carry << WORD_BITS))
            place += WORD_BITS
            j, r = place >> 5, place & 31
        # What is left above, sign included, plus the carry, must be nothing.
        sign = (state[DIGITS - 1] >> 63) & MASK
        above = (_digit(state, j) ^ sign) >> r
        for k in range(j + 1, DIGITS + 1):
            above |= _digit(state, k) ^ sign
        if below != 0 or above != 0 or (carry != 0) != (sign != 0):
            misfits[0] = 1


@device_function
def add_words_to_state(state, words, plane, count, e, base):
    """state += the value of element e. Requires: base >= -298; digits of the state move by less than 2^33 a word."""
    place = base - LOWEST_EXPONENT
    for word in range(count):
        value = np.int64(words[word * plane + e])
        j, r = place >> 5, place & 31
        if j < DIGITS - 1:
            state[j] += (value << r) & MASK
            state[j + 1] += (value << r) >> 32
        elif 32 * (j - (DIGITS - 1)) + r < 64:
            # The last digit is exact modulo 2^64, and the whole value fits it.
            state[DIGITS - 1] += value << (32 * (j - (DIGITS - 1)) + r)
        place += WORD_BITS


@kernel
def add_to_states_block(start, stop, words_at, plane, count, columns, bases_at, states_at):
    """states [elements, NB] += the values, left canonical."""
    states, bases = integers_2(states_at, stop, NB), integers_1(bases_at, stop // columns + 1)
    words = words_1(words_at, plane * count)
    for e in range(start, stop):
        carry_state(states[e])
        add_words_to_state(states[e], words, plane, count, e, bases[e // columns])
        carry_state(states[e])


@kernel
def bounds_of_words_block(start, stop, words_at, plane, count, columns, bases_at, low_at, high_at):
    """Bounds of the values of row i, as `bounds_block`; words of any size, int64 bases, low and high [rows]."""
    words, bases = words_1(words_at, plane * count), integers_1(bases_at, stop)
    low, high = integers_1(low_at, stop), integers_1(high_at, stop)
    for i in range(start, stop):
        lowest, highest = NOTHING, -NOTHING
        for e in range(i * columns, (i + 1) * columns):
            carry, top = 0, -NOTHING
            for word in range(count + 1):
                value = carry
                if word < count:
                    value += np.int64(words[word * plane + e])
                carry = (value + _HALF) >> WORD_BITS
                kept = value - (carry << WORD_BITS)
                if kept != 0:
                    place = bases[i] + WORD_BITS * word
                    lowest = min(lowest, place + trailing_zeros(kept))
                    # The words below the highest one make less than its last place.
                    top = place + bit_length(abs(kept))
            highest = max(highest, top)
        low[i], high[i] = lowest, highest


@kernel
def grow_block(start, stop, words_at, plane, count, columns, lower_by_at, out_at, out_plane, out_count, misfits_at):
    """out = the values of words of any size on bases that are smaller by lower_by[row], in normal form.

    misfits[0] becomes 1 if `out_count` words do not hold one, above or below.
    """
    words, out = words_1(words_at, plane * count), words_1(out_at, out_plane * out_count)
    lower_by, misfits = integers_1(lower_by_at, stop // columns + 1), integers_1(misfits_at, 1)
    for e in range(start, stop):
        shift = lower_by[e // columns]
        skipped, r = shift // WORD_BITS, shift % WORD_BITS
        for word in range(min(skipped, out_count)):
            out[word * out_plane + e] = np.int32(0)
        carry = 0
        for word in range(max(count, out_count - skipped)):
            # |value| < 2^31 * 2^25 and |carry| < 2^32.
            value = carry
            if word < count:
                value += np.int64(words[word * plane + e]) << r
            carry = (value + _HALF) >> WORD_BITS
            kept = value - (carry << WORD_BITS)
            if 0 <= word + skipped < out_count:
                out[(word + skipped) * out_plane + e] = np.int32(kept)
            elif kept != 0:
                misfits[0] = 1
        if carry != 0:
            misfits[0] = 1
