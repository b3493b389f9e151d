"""The digest of a tensor: two 64-bit lanes, each the sum modulo 2^64 of a mix of every word's place and bits.

Because a lane is a sum, it can be gathered in any order and over any sharding, and one changed word changes both lanes
by the difference of two mixes. The first mix is the finaliser of splitmix64 (Steele, Lea, Flood, 2014).
"""

from collections.abc import Iterable, Sequence

from .formats import Format, is_nan

SPLITMIX_FIRST = 0xBF58476D1CE4E5B9
SPLITMIX_SECOND = 0x94D049BB133111EB
HIGH_INDEX_FACTOR = 0xD6E8FEB86659FD93
SECOND_LANE_FACTOR = 0x9E3779B97F4A7C15
SECOND_LANE_MULTIPLIER = 0xD6E8FEB86659FD93
WORD_BITS = 32
_MASK = (1 << 64) - 1


def words_of(elements: Sequence[int], bits: int, form: Format | None = None) -> list[int]:
    """The 32-bit words of a tensor in row-major order, from the bit patterns of its elements.

    `bits` is the width of an element: 8, 16 or 32 bits are one word, 64 bits are two, low word first. `form` is given
    for floats: a NaN becomes the canonical one.
    """
    words = []
    for element in elements:
        if form is not None and is_nan(element, form):
            element = form.nan_bits
        words.append(element & 0xFFFFFFFF)
        if bits == 64:
            words.append(element >> WORD_BITS)
    return words


def mix(j: int, bits: int) -> tuple[int, int]:
    """What the word `bits` at place `j` adds to the two lanes."""
    z = ((j << WORD_BITS | bits) + (j >> WORD_BITS) * HIGH_INDEX_FACTOR) & _MASK
    z = (z ^ z >> 30) * SPLITMIX_FIRST & _MASK
    z = (z ^ z >> 27) * SPLITMIX_SECOND & _MASK
    z ^= z >> 31
    y = z * SECOND_LANE_FACTOR & _MASK
    y = (y ^ y >> 32) * SECOND_LANE_MULTIPLIER & _MASK
    return z, y ^ y >> 29


def lanes(words: Iterable[int], first_place: int = 0) -> tuple[int, int]:
    """The two lanes of a sequence of words whose first one stands at `first_place`."""
    first = second = 0
    for j, word in enumerate(words, first_place):
        z, y = mix(j, word)
        first, second = first + z, second + y
    return first & _MASK, second & _MASK
