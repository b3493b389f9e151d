"""round(g * d), element by element: what a gradient of a function of one variable is.

A product of two float32 values is exact in float64, so the processor's one rounding to float32, or the same on integers
for a narrower format, is that of the product. What is no normal number is done again on integers.
"""

import numpy as np

from ....arithmetic.formats import FLOAT32, FLOAT64
from .compiler import device_function
from .digits import exponent_of, significand_of
from .integers import pattern_of_float, shift_right_logical
from .memory import words_1
from .rounding import round_128
from .vectors import float32s_1, float_of_float32_pattern

_SIGNIFICAND_BITS, _FRACTION_BITS, _BIAS = FLOAT64.significand_bits, FLOAT64.fraction_bits, FLOAT64.top_exponent - 1
_MAGNITUDE = FLOAT64.sign_bit - 1
_FLOAT32_BITS = FLOAT32.significand_bits
_INFINITY, _FLOAT32_MAGNITUDE = FLOAT32.infinity_bits, FLOAT32.sign_bit - 1
_SMALLEST_NORMAL, _LARGEST = 2.0**-126, 2.0**128


@device_function
def product(a, b, significand_bits, exponent_bits):
    """Bits of the product of two float32 patterns, rounded once; a NaN is canonical."""
    fraction_bits = significand_bits - 1
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    sign = 1 << (significand_bits + exponent_bits - 1) if (a < 0) != (b < 0) else 0
    size_a, size_b = a & _FLOAT32_MAGNITUDE, b & _FLOAT32_MAGNITUDE
    largest, smallest = max(size_a, size_b), min(size_a, size_b)
    if largest > _INFINITY or (largest == _INFINITY and smallest == 0):
        return infinity | 1 << (fraction_bits - 1)
    if largest == _INFINITY:
        return sign | infinity
    significand = significand_of(size_a) * significand_of(size_b)
    return sign | round_128(0, significand, exponent_of(size_a) + exponent_of(size_b), significand_bits, exponent_bits)


@device_function
def _is_usual(a, b, smallest_normal):
    """Whether two float32 patterns are normal numbers, and their product one of the output's format or above it."""
    x, y = float_of_float32_pattern(a), float_of_float32_pattern(b)
    usual = (abs(x) >= _SMALLEST_NORMAL) & (abs(y) >= _SMALLEST_NORMAL) & (abs(x) < _LARGEST) & (abs(y) < _LARGEST)
    return usual & ((pattern_of_float(x * y) & _MAGNITUDE) >= smallest_normal)


@device_function
def multiply_tile(a_at, out_at, size, significand_bits, exponent_bits):
    """out[k] = bits of a[k] * out[k], k < size; int32 [size] both, float32 patterns at entry."""
    cut = _SIGNIFICAND_BITS - significand_bits
    half = 1 << (cut - 1)
    rebias = (_BIAS + 1 - (1 << (exponent_bits - 1))) << (significand_bits - 1)
    infinity = ((1 << exponent_bits) - 1) << (significand_bits - 1)
    sign_shift = 64 - significand_bits - exponent_bits
    smallest_normal = (_BIAS + 2 - (1 << (exponent_bits - 1))) << _FRACTION_BITS
    a, out, floats = words_1(a_at, size), words_1(out_at, size), float32s_1(out_at, size)
    unusual = 0
    for t in range(size):
        unusual += 0 if _is_usual(a[t], out[t], smallest_normal) else 1
    if unusual == 0 and significand_bits == _FLOAT32_BITS:
        for t in range(size):
            floats[t] = np.float32(float_of_float32_pattern(a[t]) * float_of_float32_pattern(out[t]))
    elif unusual == 0:
        for t in range(size):
            pattern = pattern_of_float(float_of_float32_pattern(a[t]) * float_of_float32_pattern(out[t]))
            absolute = pattern & _MAGNITUDE
            rounded = shift_right_logical(absolute + (half - 1) + (shift_right_logical(absolute, cut) & 1), cut)
            bits = min(rounded - rebias, infinity)
            out[t] = np.int32(bits | shift_right_logical(pattern & ~_MAGNITUDE, sign_shift))
    else:
        for t in range(size):
            out[t] = product(np.int64(a[t]), np.int64(out[t]), significand_bits, exponent_bits)
