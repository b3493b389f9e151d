"""exp and log of a float, correctly rounded: the definition, on Python integers.

A value is bracketed in fixed point with more and more bits until both ends of the bracket round alike (Ziv). It ends,
because e^x and log x of a binary number are never a tie, apart from e^0 and log 1, which are exact.
"""

from functools import cache
from math import isqrt

from .formats import FLOAT32, Format, decode, is_infinity, is_nan
from .rounding import round_integer

GUARD_BITS = 32
"""Fixed-point results below are off by less than 2^(GUARD_BITS - precision); fewer than 2^20 roundings add up."""


def _arc_hyperbolic_tangent(numerator: int, denominator: int, precision: int) -> int:
    """atanh(numerator / denominator) * 2^precision, by its series. Requires: a quotient of at most 1/3."""
    power = (numerator << precision) // denominator
    square = (power * power) >> precision
    total, n = 0, 1
    while power not in (0, -1):
        total += power // n
        power = (power * square) >> precision
        n += 2
    return total


@cache
def log_of_2(precision: int) -> int:
    """ln 2 * 2^precision, within 2^GUARD_BITS: 18 atanh(1/26) - 2 atanh(1/4801) + 8 atanh(1/8749)."""
    return (
        18 * _arc_hyperbolic_tangent(1, 26, precision)
        - 2 * _arc_hyperbolic_tangent(1, 4801, precision)
        + 8 * _arc_hyperbolic_tangent(1, 8749, precision)
    )


def exp_fixed(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """e^(value * 2^exponent) as (n, k): n * 2^(k - precision), n within 2^GUARD_BITS. Requires: |argument| < 2^8."""
    shift = exponent + precision
    x = value << shift if shift >= 0 else value >> -shift
    ln2 = log_of_2(precision + 16) >> 16
    k = (2 * x + ln2) // (2 * ln2)
    # e^x = 2^k * (e^(r / 2^8))^(2^8) with |r| <= ln2 / 2; each squaring doubles the error.
    r = (x - k * ln2) >> 8
    total = term = 1 << precision
    n = 1
    while term not in (0, -1):
        term = ((term * r) >> precision) // n
        total += term
        n += 1
    for _ in range(8):
        total = (total * total) >> precision
    return total, k


def log_fixed(value: int, exponent: int, precision: int) -> int:
    """ln(value * 2^exponent) * 2^precision, within 2^GUARD_BITS. Requires: value > 0, |exponent| < 2^10."""
    k = value.bit_length() - 1
    wide = precision + 40
    m = value << (wide - k)
    # ln m = 2^9 * ln(m^(1 / 2^9)); the roots leave an argument of the series below 2^-10.
    for _ in range(9):
        m = isqrt(m << wide)
    one = 1 << wide
    log_m = _arc_hyperbolic_tangent(m - one, m + one, wide) << 10
    return (log_m + (k + exponent) * log_of_2(wide)) >> 40


def _round_bracketed(approximate, form: Format) -> int:
    """Round a function of the precision, `approximate(precision) -> (n, exponent)`, n within 2^GUARD_BITS."""
    precision = 128
    while True:
        n, exponent = approximate(precision)
        error = 1 << GUARD_BITS
        low, high = round_integer(n - error, exponent, form), round_integer(n + error, exponent, form)
        if low == high:
            return low
        precision *= 2


def exp(bits: int, form: Format = FLOAT32) -> int:
    """Bits of e^x rounded to the format of x. exp(-inf) = +0, exp(inf) = inf, exp(nan) = the canonical NaN."""
    if is_nan(bits, form):
        return form.nan_bits
    if is_infinity(bits, form):
        return 0 if bits & form.sign_bit else form.infinity_bits
    significand, exponent = decode(bits, form)
    if significand == 0:
        return round_integer(1, 0, form)
    if abs(significand) << max(exponent, 0) >> max(-exponent, 0) >= 128:
        # Beyond every format here but float64: e^128 > 2^128, e^-128 < 2^-150.
        return 0 if significand < 0 else form.infinity_bits

    def approximate(precision: int) -> tuple[int, int]:
        n, k = exp_fixed(significand, exponent, precision)
        return n, k - precision

    return _round_bracketed(approximate, form)


def log(bits: int, form: Format = FLOAT32) -> int:
    """Bits of ln x rounded to the format of x. log(±0) = -inf, log(x < 0) and log(nan) = the canonical NaN."""
    if is_nan(bits, form):
        return form.nan_bits
    if bits & ~form.sign_bit == 0:
        return form.infinity_bits | form.sign_bit
    if bits & form.sign_bit:
        return form.nan_bits
    if is_infinity(bits, form):
        return form.infinity_bits
    significand, exponent = decode(bits, form)
    if significand << exponent == 1 if exponent >= 0 else significand == 1 << -exponent:
        return 0
    return _round_bracketed(lambda precision: (log_fixed(significand, exponent, precision), -precision), form)
