"""exp, log, the normal distribution, ln 2 and pi in fixed point, on Python integers, to any number of bits."""

from functools import cache
from math import isqrt

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


@cache
def pi_fixed(precision: int) -> int:
    """pi * 2^precision, within 2^GUARD_BITS: 16 arctan(1/5) - 4 arctan(1/239)."""

    def arctangent_of_inverse(n: int) -> int:
        power, total, k = (1 << precision) // n, 0, 1
        while power:
            total += (power // k) * (1 if k % 4 == 1 else -1)
            power //= n * n
            k += 2
        return total

    return 16 * arctangent_of_inverse(5) - 4 * arctangent_of_inverse(239)


def normal_fixed(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """(Phi(x), phi(x)) * 2^precision of x = value * 2^exponent, each within 2^GUARD_BITS. Requires: |x| < 16.

    Phi(x) = 1/2 + phi(x) (x + x^3 / 3 + x^5 / (3 5) + ...), phi(x) = e^(-x^2 / 2) / sqrt(2 pi): nothing cancels in the sum.
    """
    wide = precision + 64
    n, k = exp_fixed(-value * value, 2 * exponent - 1, wide)
    density = (n << wide) // isqrt(2 * pi_fixed(wide) << wide)  # of phi(x) = density * 2^(k - wide), relative to it
    shift = exponent + wide
    x = abs(value) << shift if shift >= 0 else abs(value) >> -shift
    square = (x * x) >> wide
    term, total, odd = x, 0, 1
    while term:
        total += term
        odd += 2
        term = (term * square >> wide) // odd
    half = 1 << (wide - 1)
    above = (density * total) >> (wide - k)
    return (half + (above if value > 0 else -above)) >> 64, density >> (64 - k)
