"""Windowed digits: an exact integer in a few 32-bit words, on a lowest exponent that a row shares.

value = 2^base * sum over j of words[j] * 2^(26 j), the words signed. In normal form each word lies in [-2^25, 2^25), so
63 states of one window may be added word by word, as plain int32, before a carry is due: that is what lets an ordinary
integer all-reduce add them. 26 bits, because two neighbouring words then make an integer that float64 holds exactly.
"""

from .formats import DIGIT_BITS, DIGITS, FLOAT64, LOWEST_EXPONENT

WORD_BITS = FLOAT64.significand_bits // 2
STORED_BITS = 32
MAXIMUM_STATES = (1 << (STORED_BITS - WORD_BITS)) - 1
"""States in normal form that may be added word by word: 63 words of at most 2^25, and a carry below 2^7, fit 32 bits."""

LOWEST_BASE = LOWEST_EXPONENT
HIGHEST_BASE = LOWEST_EXPONENT + DIGIT_BITS * (DIGITS + 1)
MAXIMUM_WORDS = -(-(DIGIT_BITS * (DIGITS + 1) + 2) // WORD_BITS)
"""Words that hold everything a long accumulator can, its last digit being 64 bits wide: 24."""

NOTHING = 1 << 20
"""The lowest exponent of zeros alone, beyond that of any value; their highest one is its negative."""

_RADIX = 1 << WORD_BITS
_HALF = _RADIX >> 1


def words_of(value: int, count: int) -> list[int]:
    """`value` as `count` words in normal form, little end first. Raises OverflowError if that many do not hold it."""
    words, rest = [], value
    for _ in range(count):
        word = (rest + _HALF) % _RADIX - _HALF
        words.append(word)
        rest = (rest - word) >> WORD_BITS
    if rest:
        raise OverflowError(f"{count} words of {WORD_BITS} bits do not hold an integer of {value.bit_length()} bits")
    return words


def value_of(words: list[int]) -> int:
    """The integer that any words stand for, in units of 2^base."""
    return sum(word << (WORD_BITS * j) for j, word in enumerate(words))


def grow(words: list[int], lower_by: int, count: int) -> list[int]:
    """The same value on a base that is `lower_by` smaller, in `count` words. Raises OverflowError if they are too few."""
    return words_of(value_of(words) << lower_by, count)


def words_for(low: int, high: int) -> int:
    """Words that hold every multiple of 2^low smaller in magnitude than 2^high, on base `low`."""
    # Normal form holds magnitudes below 2^(26 n - 2) on both sides.
    return max(1, -(-(high - low + 2) // WORD_BITS))
