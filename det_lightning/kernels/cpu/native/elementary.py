"""Functions of one variable, rounded once: `arithmetic.elementary`.

Whole tiles of elements go through a short float64 evaluation whose error is below `doubt` last places. Where a rounding
to the output could go either way, where the processor may flush a subnormal number, and at special values, the element is
done again: specials from a table, the others by pairs of float64.
"""

import numpy as np

from ....arithmetic.elementary import DEFINED_BELOW_EDGE, DERIVATIVES, EDGES
from ....arithmetic.formats import FLOAT32, FLOAT64
from . import elementary_pairs, elementary_short
from .compiler import device_function, kernel
from .digits import exponent_of, significand_of
from .double_double import fast_two_sum
from .elementary_product import multiply_tile
from .integers import float_from_pattern, pattern_of_float, shift_right_logical
from .memory import words_1
from .rounding import round_128
from .vectors import float32s_1, float_of_float32_pattern, stack_floats

TILE = 256
AT_ZERO, AT_MINUS_ZERO, AT_INFINITY, AT_MINUS_INFINITY, AT_EDGE, AT_NAN, SPECIALS = range(7)
"""Places in the table of special values."""

_SIGNIFICAND_BITS, _FRACTION_BITS, _BIAS = FLOAT64.significand_bits, FLOAT64.fraction_bits, FLOAT64.top_exponent - 1
_MAGNITUDE = FLOAT64.sign_bit - 1
_FLOAT32_BITS, _FLOAT32_EXPONENT_BITS = FLOAT32.significand_bits, FLOAT32.exponent_bits
_INFINITY, _FLOAT32_MAGNITUDE = FLOAT32.infinity_bits, FLOAT32.sign_bit - 1
_SMALLEST_NORMAL, _LARGEST = 2.0**-126, 2.0**128
_OUT_OF_SIGHT = (_BIAS - 200) << _FRACTION_BITS


@device_function
def exact_float64(bits):
    """A finite float32 pattern as float64, built from integers: flush-to-zero modes cannot touch it."""
    return np.float64(significand_of(bits)) * float_from_pattern((exponent_of(bits) + _BIAS) << _FRACTION_BITS)


@device_function
def round_float64(value, significand_bits, exponent_bits):
    """Bits of a normal float64, rounded once."""
    pattern = pattern_of_float(value)
    significand = (pattern & ((1 << _FRACTION_BITS) - 1)) | (1 << _FRACTION_BITS)
    exponent = ((pattern & _MAGNITUDE) >> _FRACTION_BITS) - _BIAS - _FRACTION_BITS
    bits = round_128(0, significand, exponent, significand_bits, exponent_bits)
    return bits | (1 << (significand_bits + exponent_bits - 1)) if pattern < 0 else bits


@device_function
def is_decided(value, doubt, significand_bits, exponent_bits):
    """Whether `round_float64` stays the same when the pattern of `value` moves by `doubt`. A zero is not decided."""
    pattern = pattern_of_float(value) & _MAGNITUDE
    places = (pattern >> _FRACTION_BITS) - _BIAS
    lowest_normal = 2 - (1 << (exponent_bits - 1))
    shift = min(_SIGNIFICAND_BITS - significand_bits + max(lowest_normal - places, 0), _SIGNIFICAND_BITS + 1)
    significand = (pattern & ((1 << _FRACTION_BITS) - 1)) | (1 << _FRACTION_BITS)
    below = significand & ((1 << shift) - 1)
    return pattern != 0 and abs(below - (1 << (shift - 1))) > doubt


@device_function
def round_pair(high, low, significand_bits, exponent_bits):
    """Bits of high + low, rounded once.

    The pair is first rounded to odd at 53 bits: an inexact sum never looks like a tie of 24 bits or fewer.
    """
    high, low = fast_two_sum(high, low)
    if high == 0.0:
        return 0
    pattern = pattern_of_float(high)
    if low != 0.0 and (pattern & 1) == 0:
        pattern += 1 if (low > 0.0) == (high > 0.0) else -1
    return round_float64(float_from_pattern(pattern), significand_bits, exponent_bits)


def _block(name: str):
    """The kernel of one function."""
    edge = {None: -np.inf, 0x00000000: 0.0, 0xBF800000: -1.0}[EDGES.get(name)]
    nan_below_edge = name not in DEFINED_BELOW_EDGE
    is_derivative = name in DERIVATIVES.values()
    short, pairs = getattr(elementary_short, name), getattr(elementary_pairs, name)

    @device_function
    def one(bits, specials, doubt, significand_bits, exponent_bits):
        """The bits of the function at a float32 pattern."""
        magnitude = bits & _FLOAT32_MAGNITUDE
        if magnitude == 0:
            return np.int64(specials[AT_MINUS_ZERO if bits < 0 else AT_ZERO])
        if magnitude > _INFINITY:
            return np.int64(specials[AT_NAN])
        if magnitude == _INFINITY:
            return np.int64(specials[AT_MINUS_INFINITY if bits < 0 else AT_INFINITY])
        x = exact_float64(bits)
        if x <= edge:
            if x == edge:
                return np.int64(specials[AT_EDGE])
            if nan_below_edge:
                return np.int64(specials[AT_NAN])
        z = short(x)
        if is_decided(z, doubt, significand_bits, exponent_bits):
            return round_float64(z, significand_bits, exponent_bits)
        high, low = pairs(x)
        return round_pair(high, low, significand_bits, exponent_bits)

    @kernel
    def block(start, stop, words_at, gradient_at, out_at, specials_at, doubt, out_significand_bits, out_exponent_bits):
        """out[k] = bits of the function of words[k], start <= k < stop; int32 both, specials: int32 [SPECIALS].

        Of a derivative: with gradient_at other than 0, out[k] = bits of gradient[k] times its float32 value.

        Requires: 0 <= doubt <= 2^60, above twice the error of the short form in last places of its value.
        """
        # A gradient multiplies the value in float32.
        significand_bits = _FLOAT32_BITS if gradient_at != 0 else out_significand_bits
        exponent_bits = _FLOAT32_EXPONENT_BITS if gradient_at != 0 else out_exponent_bits
        specials, tile = words_1(specials_at, SPECIALS), stack_floats(TILE)
        cut = _SIGNIFICAND_BITS - significand_bits
        half, below_cut = 1 << (cut - 1), (1 << cut) - 1
        rebias = (_BIAS + 1 - (1 << (exponent_bits - 1))) << (significand_bits - 1)
        infinity = ((1 << exponent_bits) - 1) << (significand_bits - 1)
        sign_shift = 64 - significand_bits - exponent_bits
        smallest_normal = (_BIAS + 2 - (1 << (exponent_bits - 1))) << _FRACTION_BITS
        for number in range((stop - start + TILE - 1) // TILE):
            first = start + number * TILE
            size = min(TILE, stop - first)
            words, out = words_1(words_at + 4 * first, size), words_1(out_at + 4 * first, size)
            doubtful = 0
            for t in range(size):
                x = float_of_float32_pattern(words[t])
                z = short(x)
                tile[t] = z
                absolute = pattern_of_float(z) & _MAGNITUDE
                near_tie = ((absolute + (doubt - half)) & below_cut) <= 2 * doubt
                small = (absolute < smallest_normal) & ((absolute > _OUT_OF_SIGHT) | (absolute == 0))
                ordinary = (abs(x) >= _SMALLEST_NORMAL) & (abs(x) < _LARGEST) & (x > edge)
                doubtful += 0 if ordinary & ~(near_tie | small) else 1
            if significand_bits == _FLOAT32_BITS:
                # The processor's own rounding; what could be subnormal is doubtful, so flushing cannot matter.
                rounded_floats = float32s_1(out_at + 4 * first, size)
                for t in range(size):
                    rounded_floats[t] = np.float32(tile[t])
            else:
                for t in range(size):
                    pattern = pattern_of_float(tile[t])
                    absolute = pattern & _MAGNITUDE
                    rounded = shift_right_logical(absolute + (half - 1) + (shift_right_logical(absolute, cut) & 1), cut)
                    # What is far below the format comes out below every exponent.
                    bits = max(min(rounded - rebias, infinity), 0)
                    out[t] = np.int32(bits | shift_right_logical(pattern & ~_MAGNITUDE, sign_shift))
            for t in range(size if doubtful != 0 else 0):
                x, z = float_of_float32_pattern(words[t]), tile[t]
                absolute = pattern_of_float(z) & _MAGNITUDE
                near_tie = ((absolute + (doubt - half)) & below_cut) <= 2 * doubt
                small = (absolute < smallest_normal) & ((absolute > _OUT_OF_SIGHT) | (absolute == 0))
                ordinary = (abs(x) >= _SMALLEST_NORMAL) & (abs(x) < _LARGEST) & (x > edge)
                if not (ordinary & ~(near_tie | small)):
                    out[t] = one(np.int64(words[t]), specials, doubt, significand_bits, exponent_bits)
            if is_derivative and gradient_at != 0:
                multiply_tile(
                    gradient_at + 4 * first, out_at + 4 * first, size, out_significand_bits, out_exponent_bits
                )

    return block


exp_block = _block("exp")
expm1_block = _block("expm1")
gelu_block = _block("gelu")
gelu_derivative_block = _block("gelu_derivative")
log_block = _block("log")
log1p_block = _block("log1p")
log1p_derivative_block = _block("log1p_derivative")
reciprocal_block = _block("reciprocal")
reciprocal_derivative_block = _block("reciprocal_derivative")
rsqrt_block = _block("rsqrt")
rsqrt_derivative_block = _block("rsqrt_derivative")
sigmoid_block = _block("sigmoid")
sigmoid_derivative_block = _block("sigmoid_derivative")
silu_block = _block("silu")
silu_derivative_block = _block("silu_derivative")
softplus_block = _block("softplus")
sqrt_block = _block("sqrt")
sqrt_derivative_block = _block("sqrt_derivative")
tanh_block = _block("tanh")
tanh_derivative_block = _block("tanh_derivative")
