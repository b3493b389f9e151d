"""Square roots and reciprocals of significand * 2^exponent, correctly rounded from exact integers, and their derivatives.

A root is cut to an integer that is long enough for every format, and one more bit says whether anything was cut: the
rounding of both is that of the root.
"""

from math import isqrt

from .formats import Format
from .rounding import round_integer

_ROOT_BITS = 96
"""A root or quotient is cut to at least this many bits."""


def _round_cut(value: int, is_cut: bool, exponent: int, out: Format) -> int:
    """The rounding of a number in [value, value + 1) * 2^exponent, value itself only if nothing is cut."""
    return round_integer(2 * value + is_cut, exponent - 1, out)


def _even(value: int, exponent: int) -> tuple[int, int]:
    """The same number with an even exponent."""
    return (value << (exponent & 1), exponent - (exponent & 1))


def sqrt(value: int, exponent: int, out: Format) -> int:
    """sqrt(x); the canonical NaN of a negative number."""
    if value < 0:
        return out.nan_bits
    value, exponent = _even(value, exponent)
    root = isqrt(value << 2 * _ROOT_BITS)
    return _round_cut(root, root * root != value << 2 * _ROOT_BITS, exponent // 2 - _ROOT_BITS, out)


def _reciprocal_root(value: int, power: int) -> tuple[int, bool, int]:
    """(cut, whether it is cut, shift): value^(-power / 2) = cut * 2^-shift."""
    divisor = value**power
    shift = _ROOT_BITS + divisor.bit_length()
    root = isqrt((1 << 2 * shift) // divisor)
    return root, root * root * divisor != 1 << 2 * shift, shift


def rsqrt(value: int, exponent: int, out: Format) -> int:
    """1 / sqrt(x); the canonical NaN of a negative number."""
    if value < 0:
        return out.nan_bits
    value, exponent = _even(value, exponent)
    root, is_cut, shift = _reciprocal_root(value, 1)
    return _round_cut(root, is_cut, -shift - exponent // 2, out)


def sqrt_derivative(value: int, exponent: int, out: Format) -> int:
    """1 / (2 sqrt(x))."""
    return rsqrt(value, exponent + 2, out)


def rsqrt_derivative(value: int, exponent: int, out: Format) -> int:
    """-1 / (2 x sqrt(x)); the canonical NaN of a negative number."""
    if value < 0:
        return out.nan_bits
    value, exponent = _even(value, exponent)
    root, is_cut, shift = _reciprocal_root(value, 3)
    return _round_cut(root, is_cut, -shift - 3 * exponent // 2 - 1, out) | out.sign_bit


def _quotient(numerator: int, exponent: int, denominator: int, out: Format) -> int:
    """Of a negative denominator too."""
    if denominator < 0:
        numerator, denominator = -numerator, -denominator
    return round_integer(numerator, exponent, out, denominator)


def reciprocal(value: int, exponent: int, out: Format) -> int:
    """1 / x."""
    return _quotient(1, -exponent, value, out)


def reciprocal_derivative(value: int, exponent: int, out: Format) -> int:
    """-1 / x^2."""
    return _quotient(-1, -2 * exponent, value * value, out)


def one_more(value: int, exponent: int) -> tuple[int, int]:
    """1 + x as (significand, exponent), exact."""
    if exponent >= 0:
        return (value << exponent) + 1, 0
    return value + (1 << -exponent), exponent


def reciprocal_of_one_more(value: int, exponent: int, out: Format) -> int:
    """1 / (1 + x); infinity at -1."""
    value, exponent = one_more(value, exponent)
    return out.infinity_bits if value == 0 else reciprocal(value, exponent, out)
