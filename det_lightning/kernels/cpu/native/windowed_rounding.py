"""Adding windowed digits and rounding the sum once, in one pass over memory: `arithmetic.windowed_digits`.

Whole tiles of elements go through float64 arithmetic that is exact but for its last additions, and the size of their
error is known: where it could decide the rounding, the element is summed and rounded as a long accumulator instead.
"""

import numpy as np

from ....arithmetic.formats import FLOAT32, FLOAT64, NB
from ....arithmetic.windowed_digits import WORD_BITS
from .compiler import device_function, kernel
from .digits import clear
from .integers import float_from_pattern, pattern_of_float, shift_right_logical
from .memory import integers_1, integers_2, stack_integers, words_1
from .rounding import MAGNITUDE_DIGITS, round_state
from .vectors import float32s_1, slice_of_floats, stack_floats
from .windowed_digits import add_words_to_state

TILE = 256
TOTAL, CARRY, EVEN, ODD, LOST, TILE_PLACES = (TILE * i for i in range(6))
"""Where the values of a tile lie in its scratch: one array, so that a compiler sees that no two places meet."""

_RADIX, _INVERSE = float(1 << WORD_BITS), 1.0 / (1 << WORD_BITS)
_ROUND = 1.5 * 2.0**52
"""Adding and subtracting _ROUND * r rounds a float64 below 2^51 r to a multiple of r, r a power of two."""

_SIGNIFICAND_BITS, _FRACTION_BITS, _BIAS = FLOAT64.significand_bits, FLOAT64.fraction_bits, FLOAT64.top_exponent - 1
_MAGNITUDE = FLOAT64.sign_bit - 1
_FLOAT32_BITS = FLOAT32.significand_bits

DOUBT = 4
"""Last places of a float64 around a tie in which its rounding is not trusted.

Pairs of words are exact integers, and a pair that is not zero outweighs everything below it twice over. So the sum is
off by less than 3/2 last places, and a division by an integer adds 1/2 and may double the rest: less than 4.
"""


@device_function
def power_of_two(exponent):
    """2^exponent. Requires: -1022 <= exponent <= 1023."""
    return float_from_pattern((exponent + _BIAS) << _FRACTION_BITS)


@device_function
def _plane_at(table, operand, operands, word, count, first, zeros_at):
    """The address of the words of a tile, or of zeros if there is no such operand or no such word."""
    if operand >= operands or word >= count:
        return zeros_at
    return table[operand, 0] + 4 * (word * table[operand, 1] + first)


@device_function
def _sum_tile(first, size, table, operands, count, zeros_at, tile, with_lost):
    """tile[TOTAL + t] ~ the sum of the operands' values of element first + t, in units of 2^base.

    with_lost: tile[LOST + t] becomes 0 if that sum is exact. Requires: operands * 2^31 < 2^48.
    Two words are carried and joined at a time, from below: an integer below 2^53 times a power of two.
    """
    for t in range(size):
        tile[TOTAL + t] = 0.0
        tile[CARRY + t] = 0.0
    if with_lost:
        for t in range(size):
            tile[LOST + t] = 0.0
    weight = 1.0
    # One word more than there are takes the last carry.
    for half in range(count // 2 + 1):
        even_weight, odd_weight = weight, weight * _RADIX
        weight = odd_weight * _RADIX
        even_round, odd_round = _ROUND * odd_weight, _ROUND * weight
        evens = words_1(_plane_at(table, 0, operands, 2 * half, count, first, zeros_at), size)
        odds = words_1(_plane_at(table, 0, operands, 2 * half + 1, count, first, zeros_at), size)
        more_evens = words_1(_plane_at(table, 1, operands, 2 * half, count, first, zeros_at), size)
        more_odds = words_1(_plane_at(table, 1, operands, 2 * half + 1, count, first, zeros_at), size)
        if operands <= 2 and not with_lost:
            for t in range(size):
                even = (np.float64(evens[t]) + np.float64(more_evens[t])) * even_weight + tile[CARRY + t]
                carry = (even + even_round) - even_round
                odd = (np.float64(odds[t]) + np.float64(more_odds[t])) * odd_weight + carry
                next_carry = (odd + odd_round) - odd_round
                tile[CARRY + t] = next_carry
                tile[TOTAL + t] += (odd - next_carry) + (even - carry)
            continue
        for t in range(size):
            tile[EVEN + t] = np.float64(evens[t]) + np.float64(more_evens[t])
            tile[ODD + t] = np.float64(odds[t]) + np.float64(more_odds[t])
        for operand in range(2, operands):
            evens = words_1(_plane_at(table, operand, operands, 2 * half, count, first, zeros_at), size)
            odds = words_1(_plane_at(table, operand, operands, 2 * half + 1, count, first, zeros_at), size)
            for t in range(size):
                tile[EVEN + t] += np.float64(evens[t])
                tile[ODD + t] += np.float64(odds[t])
        for t in range(size):
            even = tile[EVEN + t] * even_weight + tile[CARRY + t]
            carry = (even + even_round) - even_round
            odd = tile[ODD + t] * odd_weight + carry
            next_carry = (odd + odd_round) - odd_round
            tile[CARRY + t] = next_carry
            pair = (odd - next_carry) + (even - carry)
            # What the addition loses, exactly: the pair is zero or the larger term (Dekker's fast two-sum).
            total = tile[TOTAL + t]
            joined = pair + total
            tile[LOST + t] += abs(total - (joined - pair))
            tile[TOTAL + t] = joined


@device_function
def _scale_tile(first, size, columns, bases, halvings, divisor, tile):
    """tile[TOTAL + t] times 2^(base - halvings), divided by `divisor`."""
    t = 0
    while t < size:
        row = (first + t) // columns
        end = min(size, (row + 1) * columns - first)
        scale = power_of_two(bases[row] - halvings)
        part = slice_of_floats(tile, TOTAL + t, end - t)
        for u in range(end - t):
            part[u] *= scale
        t = end
    if divisor != 1:
        divide_by = np.float64(divisor)
        for t in range(size):
            tile[TOTAL + t] /= divide_by


@kernel
def round_block(
    start, stop, table_at, operands, zeros_at, count, columns, bases_at, out_at, denominator, divisor, halvings,
    significand_bits, exponent_bits,
):  # fmt: skip
    """out[e] = bits of (the sum over operands of their values of element e) / denominator, rounded once.

    table: int64 [operands, 2], the address of an operand's words and the distance of its planes; all share `count`,
    the bases and the shape. A power of two divides without an error, so denominator = divisor * 2^halvings is either
    one or the other; zeros: int32 [TILE]. Requires: 1 <= denominator < 2^31, 1 <= operands < 2^16, |words| <= 2^31.
    """
    table, bases = integers_2(table_at, operands, 2), integers_1(bases_at, stop // columns + 1)
    tile, state, magnitude = stack_floats(TILE_PLACES), stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)

    cut = _SIGNIFICAND_BITS - significand_bits
    half, below_cut = 1 << (cut - 1), (1 << cut) - 1
    rebias = (_BIAS + 1 - (1 << (exponent_bits - 1))) << (significand_bits - 1)
    infinity = ((1 << exponent_bits) - 1) << (significand_bits - 1)
    sign_shift = 64 - significand_bits - exponent_bits
    smallest_normal = (_BIAS + 2 - (1 << (exponent_bits - 1))) << _FRACTION_BITS

    for number in range((stop - start + TILE - 1) // TILE):
        first = start + number * TILE
        size = min(TILE, stop - first)
        out = words_1(out_at + 4 * first, size)
        _sum_tile(first, size, table, operands, count, zeros_at, tile, False)
        _scale_tile(first, size, columns, bases, halvings, divisor, tile)
        doubtful = 0
        if significand_bits == _FLOAT32_BITS:
            # The processor's own rounding to float32; what could be subnormal is doubtful, so flushing cannot matter.
            rounded_floats = float32s_1(out_at + 4 * first, size)
            for t in range(size):
                absolute = pattern_of_float(tile[TOTAL + t]) & _MAGNITUDE
                near_tie = ((absolute + (DOUBT - half)) & below_cut) <= 2 * DOUBT
                small = (absolute < smallest_normal) & (absolute != 0)
                doubtful += 1 if near_tie | small else 0
                rounded_floats[t] = np.float32(tile[TOTAL + t])
        else:
            for t in range(size):
                pattern = pattern_of_float(tile[TOTAL + t])
                absolute = pattern & _MAGNITUDE
                rounded = shift_right_logical(absolute + (half - 1) + (shift_right_logical(absolute, cut) & 1), cut)
                # A zero comes out below every exponent.
                bits = max(min(rounded - rebias, infinity), 0)
                near_tie = ((absolute + (DOUBT - half)) & below_cut) <= 2 * DOUBT
                small = (absolute < smallest_normal) & (absolute != 0)
                doubtful += 1 if near_tie | small else 0
                out[t] = np.int32(bits | shift_right_logical(pattern & ~_MAGNITUDE, sign_shift))
        if doubtful == 0:
            continue
        _sum_tile(first, size, table, operands, count, zeros_at, tile, True)
        _scale_tile(first, size, columns, bases, halvings, divisor, tile)
        for t in range(size):
            absolute = pattern_of_float(tile[TOTAL + t]) & _MAGNITUDE
            near_tie = ((absolute + (DOUBT - half)) & below_cut) <= 2 * DOUBT
            small = (absolute < smallest_normal) & (absolute != 0)
            if small or (near_tie and (divisor != 1 or tile[LOST + t] != 0.0)):
                clear(state)
                base = bases[(first + t) // columns]
                for operand in range(operands):
                    words = words_1(table[operand, 0], table[operand, 1] * count)
                    add_words_to_state(state, words, table[operand, 1], count, first + t, base)
                out[t] = np.int32(round_state(state, magnitude, denominator, significand_bits, exponent_bits))


@kernel
def carry_block(start, stop, words_at, plane, count, overflows_at):
    """Carry in place: words below the last come into [-2^25, 2^25). overflows[0] becomes 1 if a last one is outside.

    Requires: |words| < 2^31 - 2^7, as in a sum of MAXIMUM_STATES states in normal form.
    """
    overflows, carry = integers_1(overflows_at, 1), stack_floats(TILE)
    for number in range((stop - start + TILE - 1) // TILE):
        first = start + number * TILE
        size = min(TILE, stop - first)
        for t in range(size):
            carry[t] = 0.0
        for word in range(count):
            words = words_1(words_at + 4 * (word * plane + first), size)
            if word < count - 1:
                for t in range(size):
                    value = np.float64(words[t]) + carry[t]
                    # Half a unit more than the value, so that it is never a tie: floor(value / 2^26 + 1/2).
                    multiple = ((value + 0.5) * _INVERSE + _ROUND) - _ROUND
                    words[t] = np.int32(value - multiple * _RADIX)
                    carry[t] = multiple
            else:
                outside = 0
                for t in range(size):
                    value = np.float64(words[t]) + carry[t]
                    multiple = ((value + 0.5) * _INVERSE + _ROUND) - _ROUND
                    outside += 1 if multiple != 0.0 else 0
                    words[t] = np.int32(value)
                if outside != 0:
                    overflows[0] = 1
