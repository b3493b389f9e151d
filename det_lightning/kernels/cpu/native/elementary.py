"""exp and log of float32, rounded once: `arithmetic.elementary` in float64.

A short evaluation with an error below 2^-48 decides almost every element; where its rounding to the output could go
either way, the same formula is evaluated in double-double and its sum rounded to odd, then once to the output.
"""

from fractions import Fraction

import numpy as np

from ....arithmetic.elementary import exp_fixed, log_fixed, log_of_2
from .compiler import device_function, kernel
from .digits import exponent_of, significand_of
from .double_double import add, fast_two_sum, multiply, two_product, two_sum
from .integers import bit_length, float_from_pattern, pattern_of_float
from .memory import words_1
from .rounding import round_128

_PRECISION = 256


def _pair(value: Fraction) -> tuple[float, float]:
    high = value.numerator / value.denominator
    return high, float(value - Fraction(high))


def _head(value: Fraction, bits: int) -> Fraction:
    """`value` cut to a multiple of 2^-bits."""
    return Fraction(value.numerator * 2**bits // value.denominator, 2**bits)


def _exp_table() -> np.ndarray:
    """2^(j/64) as pairs."""
    ln2 = Fraction(log_of_2(_PRECISION), 1 << _PRECISION)
    rows = []
    for j in range(64):
        x = ln2 * j / 64
        n, k = exp_fixed(x.numerator * 2**_PRECISION // x.denominator, -_PRECISION, _PRECISION)
        rows.append(_pair(Fraction(n, 1 << _PRECISION) * Fraction(2) ** k))
    return np.array(rows)


def _log_table() -> np.ndarray:
    """Per seventh of fraction bits: c near 1/m with at most 11 bits, and -ln c as a pair; c = 1 on both sides of 1."""
    rows = []
    for i in range(128):
        if i in (0, 127):
            rows.append((1.0, 0.0, 0.0))
            continue
        middle = Fraction(2 * i + 257, 256) / (1 if i < 64 else 2)
        c = round(1024 / middle)
        rows.append((c / 1024, *_pair(Fraction(-log_fixed(c, -10, _PRECISION), 1 << _PRECISION))))
    return np.array(rows)


_LN2 = Fraction(log_of_2(_PRECISION), 1 << _PRECISION)
# ln2 / 64 in three parts: k * head is exact for |k| < 2^14, because the head has at most 39 bits.
_STEP_HEAD = float(_head(_LN2 / 64, 45))
_STEP_MIDDLE, _STEP_TAIL = _pair(_LN2 / 64 - Fraction(_STEP_HEAD))
_STEPS_PER_UNIT = float(1 / (_LN2 / 64))
# ln2 in three parts: e * head is exact for |e| < 2^9.
_LN2_HEAD = float(_head(_LN2, 42))
_LN2_MIDDLE, _LN2_TAIL = _pair(_LN2 - Fraction(_LN2_HEAD))

_EXP_TABLE = _exp_table()
_LOG_TABLE = _log_table()

_EXP_DEGREE = 12
_EXP_TERMS = np.array([_pair(Fraction(1, int(np.prod(range(1, n + 1), dtype=object)))) for n in range(_EXP_DEGREE + 1)])
_LOG_DEGREE = 17
_LOG_TERMS = np.array([(0.0, 0.0)] + [_pair(Fraction((-1) ** (n + 1), n)) for n in range(1, _LOG_DEGREE + 1)])

_ONE = 0x3F800000
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_ROUND_BITS = 6755399441055744.0
"""1.5 * 2^52: adding and subtracting it rounds a float64 to an integer."""


@device_function
def exact_float64(bits):
    """A finite float32 pattern as float64, built from integers: flush-to-zero modes cannot touch it."""
    significand = significand_of(bits)
    if significand == 0:
        return 0.0
    return np.float64(significand) * float_from_pattern((exponent_of(bits) + 1023) << 52)


@device_function
def round_float64(pattern, exponent):
    """float32 bits of a positive normal float64 (its pattern) * 2^exponent, rounded once."""
    places = (pattern >> 52) - 1023 + exponent
    if -126 <= places < 127:
        # The fraction carries into the exponent field by itself; ties go to even.
        rounded = (pattern + ((1 << 28) - 1) + ((pattern >> 29) & 1)) >> 29
        return rounded + ((exponent - 1023 + 127) << 23)
    significand = (pattern & ((1 << 52) - 1)) | (1 << 52)
    return round_128(0, significand, (pattern >> 52) - 1075 + exponent, 24, 8)


@device_function
def is_decided(pattern, exponent, doubt):
    """Whether `round_float64` stays the same when the pattern moves by `doubt`."""
    places = (pattern >> 52) - 1023 + exponent
    shift = min(max(29, 29 - 126 - places), 54)
    significand = (pattern & ((1 << 52) - 1)) | (1 << 52)
    below = significand & ((1 << shift) - 1)
    return abs(below - (1 << (shift - 1))) > doubt


@device_function
def round_pair(high, low, exponent):
    """float32 bits of (high + low) * 2^exponent, rounded once. Requires: high > 0.

    The pair is first rounded to odd at 53 bits: an inexact sum never looks like a tie of 24 bits or fewer.
    """
    high, low = fast_two_sum(high, low)
    pattern = pattern_of_float(high)
    if low != 0.0 and (pattern & 1) == 0:
        pattern += 1 if low > 0.0 else -1
    return round_float64(pattern, exponent)


@device_function
def exp_in_pairs(x, steps):
    """e^(x - steps * ln2 / 64) as a pair, within 2^-98."""
    r, error = two_sum(x, -(steps * _STEP_HEAD))
    product, product_error = two_product(steps, _STEP_MIDDLE)
    r, r_low = add(r, error, -product, -product_error)
    r, r_low = fast_two_sum(r, r_low - steps * _STEP_TAIL)
    high, low = _EXP_TERMS[_EXP_DEGREE, 0], _EXP_TERMS[_EXP_DEGREE, 1]
    for back in range(_EXP_DEGREE):
        n = _EXP_DEGREE - 1 - back
        high, low = multiply(high, low, r, r_low)
        high, low = add(_EXP_TERMS[n, 0], _EXP_TERMS[n, 1], high, low)
    return high, low


@device_function
def exp_bits(bits, doubt):
    """float32 bits of e^x, x a float32 pattern."""
    magnitude = bits & 0x7FFFFFFF
    if magnitude > _INFINITY:
        return _NAN
    if magnitude >= 0x43000000:
        # |x| >= 128 or infinite: e^128 > 2^128 and e^-128 < 2^-150.
        return 0 if bits < 0 else _INFINITY
    if magnitude < 0x32800000:
        # |x| < 2^-26: e^x lies within a quarter of an ulp of 1.
        return _ONE
    # e^x = 2^(k / 64) * e^r with |r| <= ln2 / 128.
    x = exact_float64(bits)
    steps = (x * _STEPS_PER_UNIT + _ROUND_BITS) - _ROUND_BITS
    k = np.int64(steps)
    table_high, table_low, exponent = _EXP_TABLE[k & 63, 0], _EXP_TABLE[k & 63, 1], k >> 6

    r, error = two_sum(x, -(steps * _STEP_HEAD))
    r += error - steps * _STEP_MIDDLE
    tail = _EXP_TERMS[6, 0]
    for back in range(4):
        tail = tail * r + _EXP_TERMS[5 - back, 0]
    short = table_high + (table_low + table_high * (r + r * r * tail))
    pattern = pattern_of_float(short)
    if is_decided(pattern, exponent, doubt):
        return round_float64(pattern, exponent)

    high, low = exp_in_pairs(x, steps)
    high, low = multiply(high, low, table_high, table_low)
    return round_pair(high, low, exponent)


@device_function
def log_in_pairs(r, e, minus_log_high, minus_log_low):
    """ln(1 + r) + e * ln2 - ln c as a pair; nothing cancels by more than a factor of 4."""
    high, low = _LOG_TERMS[_LOG_DEGREE, 0], _LOG_TERMS[_LOG_DEGREE, 1]
    for back in range(_LOG_DEGREE - 1):
        n = _LOG_DEGREE - 1 - back
        high, low = multiply(high, low, r, 0.0)
        high, low = add(_LOG_TERMS[n, 0], _LOG_TERMS[n, 1], high, low)
    high, low = multiply(high, low, r, 0.0)
    high, low = add(minus_log_high, minus_log_low, high, low)
    product, product_error = two_product(e, _LN2_MIDDLE)
    high, low = add(product, product_error + e * _LN2_TAIL, high, low)
    return add(e * _LN2_HEAD, 0.0, high, low)


@device_function
def log_bits(bits, doubt):
    """float32 bits of ln x, x a float32 pattern."""
    magnitude = bits & 0x7FFFFFFF
    if magnitude == 0:
        return _INFINITY | 1 << 31
    if bits < 0 or magnitude > _INFINITY:
        return _NAN
    if magnitude == _INFINITY:
        return _INFINITY
    if bits == _ONE:
        return 0
    significand, exponent = significand_of(bits), exponent_of(bits)
    moved = 24 - bit_length(significand)
    significand, exponent = significand << moved, exponent - moved + 23
    i = (significand >> 16) & 127
    # x = m * 2^exponent with m in [0.75, 1.5): near 1 the exponent is 0 and c = 1, so nothing cancels.
    scale = 2.0**-23
    if i >= 64:
        scale, exponent = 2.0**-24, exponent + 1
    c, minus_log_high, minus_log_low = _LOG_TABLE[i, 0], _LOG_TABLE[i, 1], _LOG_TABLE[i, 2]
    # Exact: m * c has at most 35 bits.
    r = np.float64(significand) * scale * c - 1.0
    e = np.float64(exponent)

    tail = _LOG_TERMS[9, 0]
    for back in range(7):
        tail = tail * r + _LOG_TERMS[8 - back, 0]
    large, error = two_sum(e * _LN2_HEAD, minus_log_high)
    large, small = two_sum(large, r)
    short = large + (small + (error + (minus_log_low + e * _LN2_MIDDLE) + r * r * tail))
    sign = 1 << 31 if short < 0.0 else 0
    pattern = pattern_of_float(abs(short))
    if is_decided(pattern, 0, doubt):
        return sign | round_float64(pattern, 0)

    high, low = log_in_pairs(r, e, minus_log_high, minus_log_low)
    if sign != 0:
        high, low = -high, -low
    return sign | round_pair(high, low, 0)


@kernel
def exp_block(start, stop, words_at, out_at, length, total, doubt):
    """out[k] = exp_bits(words[k]) for blocks of `length` elements; int32 [total] both.

    The short evaluation decides where it is further than `doubt` units of its last place from a tie; its error is below
    16 units, and a `doubt` of 2^62 sends every element to double-double.
    """
    words, out = words_1(words_at, total), words_1(out_at, total)
    for k in range(start * length, min(stop * length, total)):
        out[k] = exp_bits(np.int64(words[k]), doubt)


@kernel
def log_block(start, stop, words_at, out_at, length, total, doubt):
    """out[k] = log_bits(words[k]) for blocks of `length` elements; int32 [total] both."""
    words, out = words_1(words_at, total), words_1(out_at, total)
    for k in range(start * length, min(stop * length, total)):
        out[k] = log_bits(np.int64(words[k]), doubt)
