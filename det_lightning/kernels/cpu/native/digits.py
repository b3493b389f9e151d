"""Kernels on long-accumulator states: adding terms, carrying, and the final rounding of whole arrays of states."""

from ....arithmetic.formats import DIGITS, FLOAT32, LOWEST_EXPONENT, NB
from .compiler import device_function, kernel
from .memory import integers_2, stack_integers, words_1
from .rounding import MAGNITUDE_DIGITS, MASK, round_state

_FRACTION_BITS = FLOAT32.fraction_bits
EXPONENT_MASK = FLOAT32.exponent_mask
_FRACTION = (1 << FLOAT32.fraction_bits) - 1
_HIDDEN = 1 << FLOAT32.fraction_bits
LOWEST = FLOAT32.lowest_exponent


@device_function
def clear(state):
    for j in range(NB):
        state[j] = 0


@device_function
def significand_of(bits):
    """The signed significand of a finite float32 pattern."""
    value = bits & _FRACTION
    if (bits & 0x7F800000) != 0:
        value |= _HIDDEN
    return -value if bits < 0 else value


@device_function
def field_of(bits):
    """The exponent field of a float32 pattern; EXPONENT_MASK for special values."""
    return (bits >> _FRACTION_BITS) & EXPONENT_MASK


@device_function
def exponent_of(bits):
    """The exponent of the last place of a finite float32 pattern."""
    return LOWEST + max(field_of(bits), 1) - 1


@device_function
def is_special(bits):
    """Whether a float32 pattern is an infinity or a NaN."""
    return (bits & 0x7F800000) == 0x7F800000


@device_function
def count_special(state, bits):
    """Count an infinity or a NaN as one term."""
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        state[DIGITS] += 1
    elif bits < 0:
        state[DIGITS + 2] += 1
    else:
        state[DIGITS + 1] += 1


@device_function
def count_special_product(state, a, b):
    """Count the product of two patterns of which at least one is an infinity or a NaN."""
    x, y = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    if x > 0x7F800000 or y > 0x7F800000 or x == 0 or y == 0:
        state[DIGITS] += 1
    elif (a < 0) != (b < 0):
        state[DIGITS + 2] += 1
    else:
        state[DIGITS + 1] += 1


@device_function
def add_integer(state, value, exponent):
    """state += value * 2^exponent. Requires: |value| < 2^48, exponent >= -298.

    A digit moves by less than 2^48, so 2^14 terms fit between two carries.
    """
    place = exponent - LOWEST_EXPONENT
    j, r = place >> 5, place & 31
    low = (value & MASK) << r
    state[j] += low & MASK
    state[j + 1] += (low >> 32) + ((value >> 32) << r)


@device_function
def _add_word(state, j, word):
    """Add to place j; what lies above the last digit folds into it modulo 2^64, which is exact if the sum fits."""
    if j < DIGITS:
        state[j] += word
    elif j == DIGITS:
        state[DIGITS - 1] += word << 32


@device_function
def add_integer_128(state, high, low, exponent):
    """state += (high, low) * 2^exponent. Requires: exponent >= -298. A digit moves by less than 2^32."""
    place = exponent - LOWEST_EXPONENT
    j, r = place >> 5, place & 31
    moved = (low & MASK) << r
    _add_word(state, j, moved & MASK)
    moved = (moved >> 32) + (((low >> 32) & MASK) << r)
    _add_word(state, j + 1, moved & MASK)
    moved = (moved >> 32) + ((high & MASK) << r)
    _add_word(state, j + 2, moved & MASK)
    moved = (moved >> 32) + ((high >> 32) << r)
    _add_word(state, j + 3, moved & MASK)
    _add_word(state, j + 4, moved >> 32)


@device_function
def carry_state(state):
    """Resolve carries in place: digits 0..16 in [0, 2^32), the last one signed."""
    carry = 0
    for j in range(DIGITS - 1):
        low = (state[j] & MASK) + (carry & MASK)
        carry = (state[j] >> 32) + (carry >> 32) + (low >> 32)
        state[j] = low & MASK
    state[DIGITS - 1] += carry


@kernel
def normalise_states(start, stop, states_at):
    """Make int64 [n, NB] canonical in place, for the rows of the block."""
    states = integers_2(states_at, stop, NB)
    for i in range(start, stop):
        carry_state(states[i])


@kernel
def finalize_states(start, stop, states_at, out_at, denominator, significand_bits, exponent_bits):
    """out[i] = bits of states[i] / denominator, rounded once; states: int64 [n, NB], out: int32 [n]."""
    states, out = integers_2(states_at, stop, NB), words_1(out_at, stop)
    magnitude = stack_integers(MAGNITUDE_DIGITS)
    for i in range(start, stop):
        out[i] = round_state(states[i], magnitude, denominator, significand_bits, exponent_bits)
