"""Exact sums divided by an exact number that is no small integer, such as a sum of class weights: rounded once.

out[e] = RN(value of digits[e] / denominator), denominator = odd * 2^exponent > 0.

Fast way: the leading 97 bits of the value and the odd part as pairs of float64 (h + l, |l| <= ulp(h) / 2), one division of
pairs, relative error below 2^-90. That decides the rounding unless the quotient lies within an ulp of float64 of a point
halfway between two results; those elements, and whatever is no finite number, are computed by the definition.
"""

from fractions import Fraction

import torch

from ..arithmetic.formats import DIGIT_BITS, DIGITS, LOWEST_EXPONENT, NB
from ..arithmetic.long_accumulator import value_of
from ..arithmetic.rounding import round_integer
from ..errors import InputError
from .digits import check_states, det_finalize, normalise_digits, output_form

_FAST_INTEGER = 1 << 31
_CHUNK = 1 << 16
_SPLITTER = float((1 << 27) + 1)
_INTEGERS = {32: torch.int32, 16: torch.int16}


def det_quotient(
    digits: torch.Tensor, denominator: int | Fraction, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Each state divided by `denominator`, rounded once: `det_finalize` for any non-negative dyadic denominator.

    Args:
        digits: int64 [..., NB], any state.
        denominator: integer times a power of two, at least 0.

    Returns:
        [...] of float32, bfloat16 or float16; special values as for `det_finalize`.

    Raises:
        InputError: another denominator, or a tensor that is no digits.
    """
    check_states("det_quotient", "digits", digits)
    form = output_form("det_quotient", dtype)
    denominator = Fraction(denominator)
    if denominator < 0 or denominator.denominator & (denominator.denominator - 1):
        raise InputError(
            f"det_quotient: the denominator is {denominator}; it must be an integer times a power of two, not negative"
        )
    if denominator.denominator == 1 and denominator < _FAST_INTEGER:
        return det_finalize(digits, dtype=dtype, denominator=int(denominator))
    odd, exponent = odd_part(denominator)
    flat = digits.reshape(-1, NB)
    out = torch.empty(len(flat), dtype=dtype, device=digits.device)
    for first in range(0, len(flat), _CHUNK):
        part = flat[first : first + _CHUNK]
        result, decided = _pairs(part, odd, exponent, dtype)
        for place in (~decided).nonzero().flatten().tolist():
            state = part[place].tolist()
            if any(state[DIGITS:]):  # infinities and NaNs stay what they are
                result[place] = det_finalize(part[place], dtype=dtype)
                continue
            bits = round_integer(value_of(state), LOWEST_EXPONENT - exponent, form, odd)
            bits -= (bits & form.sign_bit) << 1
            result[place] = torch.tensor(bits, dtype=_INTEGERS[form.bits], device=part.device).view(dtype)
        out[first : first + _CHUNK] = result
    return out.view(digits.shape[:-1])


def _pairs(digits: torch.Tensor, odd: int, exponent: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """([n] quotients, [n] whether each is certain)."""
    digits = normalise_digits(digits)
    finite = ~digits[:, DIGITS:].any(dim=1)
    negative = digits[:, DIGITS - 1] < 0
    magnitude = digits.clone()
    magnitude[negative] = -magnitude[negative]
    magnitude[:, DIGITS:] = 0
    words = normalise_digits(magnitude)[:, :DIGITS]
    used = words != 0
    top = torch.where(used, torch.arange(DIGITS, device=words.device), -1).amax(dim=1)
    padded = torch.cat([words.new_zeros(len(words), 3), words], dim=1)
    places = top.clamp(min=0).unsqueeze(1) + torch.arange(4, device=words.device)
    fourth, third, second, first = padded.gather(1, places).double().unbind(1)
    radix = float(1 << DIGIT_BITS)
    high, low = _two_sum(first * radix, second)
    rest, _ = _two_sum(third * radix, fourth)
    high, low = high * radix * radix, low * radix * radix + rest
    high, low = _two_sum(high, low)
    quotient, correction = _divide(high, low, odd)
    scale = DIGIT_BITS * (top - 3) + LOWEST_EXPONENT - exponent
    certain = finite & (top >= 0) & (words[:, DIGITS - 1] < 1 << DIGIT_BITS) & (scale.abs() < 900)
    power = ((scale.clamp(-900, 900) + 1023) << 52).view(torch.float64)
    quotient = (quotient + correction) * power
    infinity = torch.full_like(quotient, torch.inf)
    up, down = torch.nextafter(quotient, infinity), torch.nextafter(quotient, -infinity)
    certain &= _cast(up, dtype) == _cast(down, dtype)
    if dtype is not torch.float32:
        # The cast goes through float32: a result halfway there may have been rounded to halfway before.
        narrow = quotient.float()
        certain &= _cast(torch.nextafter(narrow, -infinity.float()), dtype) == _cast(
            torch.nextafter(narrow, infinity.float()), dtype
        )
    zero = finite & (top < 0)
    result = torch.where(negative, -quotient, quotient)
    return _cast(torch.where(zero, 0.0, result), dtype), certain | zero


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(torch.float32).to(dtype)


def _divide(high: torch.Tensor, low: torch.Tensor, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high + low) / divisor as a pair."""
    first = float(divisor)
    second = float(divisor - int(first))
    leading = torch.full_like(high, first)  # on the device: CUDA would multiply by the reciprocal of a host's number
    quotient = high / leading
    product, error = _two_product(quotient, first)
    remainder = ((high - product) - error) + low - quotient * second
    return quotient, remainder / leading


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a + b = s + e exactly (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def _two_product(a: torch.Tensor, b: float) -> tuple[torch.Tensor, torch.Tensor]:
    """a b = p + e exactly (Veltkamp, Dekker)."""
    p = a * b
    scaled = a * _SPLITTER
    a_high = scaled - (scaled - a)
    a_low = a - a_high
    b_scaled = b * _SPLITTER
    b_high = b_scaled - (b_scaled - b)
    b_low = b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def odd_part(denominator: Fraction) -> tuple[int, int]:
    """(odd, exponent) with denominator = odd * 2^exponent. Requires: positive, an integer times a power of two."""
    numerator = denominator.numerator
    zeros = (numerator & -numerator).bit_length() - 1
    return numerator >> zeros, zeros - (denominator.denominator.bit_length() - 1)
