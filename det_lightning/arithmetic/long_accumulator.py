"""The long accumulator: what an exact sum of float32 products is (after Kulisch, "Computer Arithmetic and Validity").

A state is NB = 21 integers. Digit j of the first 18 weighs 2^(32 j - 298); the last three places count the terms that
are NaN, +infinity and -infinity. Adding states place by place is exact, so order and grouping cannot matter.
"""

from fractions import Fraction

from .formats import (
    DIGIT_BITS,
    DIGITS,
    FLOAT32,
    LOWEST_EXPONENT,
    NAN_PLACE,
    NB,
    NEGATIVE_INFINITY_PLACE,
    POSITIVE_INFINITY_PLACE,
    Format,
    decode,
    is_infinity,
    is_nan,
)
from .rounding import round_integer

_MASK = (1 << DIGIT_BITS) - 1


def zero_state() -> list[int]:
    """The state of an empty sum."""
    return [0] * NB


def digits_of(value: int) -> list[int]:
    """Canonical digits of `value * 2^-298`: all but the last in [0, 2^32), the last one signed."""
    low = [value >> (DIGIT_BITS * j) & _MASK for j in range(DIGITS - 1)]
    return [*low, value >> (DIGIT_BITS * (DIGITS - 1))]


def value_of(state: list[int]) -> int:
    """The integer that the digits of any state stand for, in units of 2^-298. The counts are ignored."""
    return sum(digit << (DIGIT_BITS * j) for j, digit in enumerate(state[:DIGITS]))


def normalise(state: list[int]) -> list[int]:
    """The canonical state with the same value and counts."""
    return digits_of(value_of(state)) + list(state[DIGITS:])


def add_product(state: list[int], a: int, b: int, form: Format = FLOAT32) -> None:
    """Add the exact product of two bit patterns of `form` to `state`, in place. Infinity times zero counts as NaN."""
    special = [is_nan(v, form) or is_infinity(v, form) for v in (a, b)]
    if any(special):
        zero = [not s and decode(v, form)[0] == 0 for s, v in zip(special, (a, b), strict=True)]
        if is_nan(a, form) or is_nan(b, form) or any(zero):
            state[NAN_PLACE] += 1
        elif (a ^ b) & form.sign_bit:
            state[NEGATIVE_INFINITY_PLACE] += 1
        else:
            state[POSITIVE_INFINITY_PLACE] += 1
        return
    (sa, ea), (sb, eb) = decode(a, form), decode(b, form)
    _add_integer(state, sa * sb, ea + eb)


def add_term(state: list[int], a: int, form: Format = FLOAT32) -> None:
    """Add one bit pattern of `form` to `state`, in place."""
    if is_nan(a, form):
        state[NAN_PLACE] += 1
    elif is_infinity(a, form):
        state[NEGATIVE_INFINITY_PLACE if a & form.sign_bit else POSITIVE_INFINITY_PLACE] += 1
    else:
        _add_integer(state, *decode(a, form))


def _add_integer(state: list[int], value: int, exponent: int) -> None:
    for j, digit in enumerate(digits_of(value << (exponent - LOWEST_EXPONENT))):
        state[j] += digit


def finalize(state: list[int], form: Format = FLOAT32, denominator: int = 1) -> int:
    """Bits of the state's value divided by `denominator` >= 0, rounded once to `form`.

    Any NaN term, or infinities of both signs, or 0/0: the canonical NaN. x/0 is an infinity with the sign of x.
    """
    value = value_of(state)
    nan, positive, negative = state[NAN_PLACE], state[POSITIVE_INFINITY_PLACE], state[NEGATIVE_INFINITY_PLACE]
    if not (nan or positive or negative) and denominator == 0:
        nan, positive, negative = value == 0, value > 0, value < 0
    if nan or (positive and negative):
        return form.nan_bits
    if positive or negative:
        return form.infinity_bits | (form.sign_bit if negative else 0)
    return round_integer(value, LOWEST_EXPONENT, form, denominator)


def fraction_of(state: list[int]) -> Fraction | float:
    """The state's value as a fraction; a float infinity or NaN where a term was none."""
    nan, positive, negative = state[NAN_PLACE], state[POSITIVE_INFINITY_PLACE], state[NEGATIVE_INFINITY_PLACE]
    if nan or (positive and negative):
        return float("nan")
    if positive or negative:
        return float("inf") if positive else float("-inf")
    return Fraction(value_of(state)) * Fraction(2) ** LOWEST_EXPONENT
