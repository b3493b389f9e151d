"""64-bit and 128-bit integer instructions that Numba has no name for.

Everything is int64: versions of Numba turn `uint64 op int64` into float64, so unsigned types appear nowhere. A 128-bit
integer is a pair (high, low) in two's complement, the low half an int64 holding the bit pattern.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I128 = ir.IntType(64), ir.IntType(128)
_PAIR = types.UniTuple(types.int64, 2)


def _join(builder, high, low):
    return builder.or_(builder.shl(builder.zext(high, _I128), ir.Constant(_I128, 64)), builder.zext(low, _I128))


def _split(context, builder, wide):
    high = builder.trunc(builder.lshr(wide, ir.Constant(_I128, 64)), _I64)
    return context.make_tuple(builder, _PAIR, (high, builder.trunc(wide, _I64)))


@intrinsic
def multiply_add_128(typing_context, high, low, a, b):
    """(high, low) + a * b, modulo 2^128; a and b signed."""

    def generate(context, builder, signature, arguments):
        high, low, a, b = arguments
        product = builder.mul(builder.sext(a, _I128), builder.sext(b, _I128))
        return _split(context, builder, builder.add(_join(builder, high, low), product))

    return _PAIR(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def multiply_add_wide(typing_context, high, low, a, b_high, b_low):
    """(high, low) + a * (b_high, b_low), modulo 2^128; a signed."""

    def generate(context, builder, signature, arguments):
        high, low, a, b_high, b_low = arguments
        product = builder.mul(builder.sext(a, _I128), _join(builder, b_high, b_low))
        return _split(context, builder, builder.add(_join(builder, high, low), product))

    return _PAIR(types.int64, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def add_128(typing_context, high, low, high_term, low_term):
    """(high, low) + (high_term, low_term), modulo 2^128."""

    def generate(context, builder, signature, arguments):
        high, low, high_term, low_term = arguments
        total = builder.add(_join(builder, high, low), _join(builder, high_term, low_term))
        return _split(context, builder, total)

    return _PAIR(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def shift_left_128(typing_context, high, low, count):
    """(high, low) * 2^count, modulo 2^128. Requires: 0 <= count < 128."""

    def generate(context, builder, signature, arguments):
        high, low, count = arguments
        return _split(context, builder, builder.shl(_join(builder, high, low), builder.zext(count, _I128)))

    return _PAIR(types.int64, types.int64, types.int64), generate


@intrinsic
def shift_right_128(typing_context, high, low, count):
    """floor((high, low) / 2^count), signed. Requires: 0 <= count < 128."""

    def generate(context, builder, signature, arguments):
        high, low, count = arguments
        return _split(context, builder, builder.ashr(_join(builder, high, low), builder.zext(count, _I128)))

    return _PAIR(types.int64, types.int64, types.int64), generate


@intrinsic
def shift_right_logical(typing_context, value, count):
    """The bit pattern of `value` moved down, zeros entering above. Requires: 0 <= count < 64."""

    def generate(context, builder, signature, arguments):
        return builder.lshr(*arguments)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def bit_length(typing_context, value):
    """Bits of the unsigned 64-bit pattern of `value` up to its highest one; 0 for 0."""

    def generate(context, builder, signature, arguments):
        zeros = builder.ctlz(arguments[0], ir.Constant(cgutils.bool_t, 0))
        return builder.sub(ir.Constant(_I64, 64), zeros)

    return types.int64(types.int64), generate


@intrinsic
def trailing_zeros(typing_context, value):
    """Zeros below the lowest one of the 64-bit pattern of `value`; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(cgutils.bool_t, 0))

    return types.int64(types.int64), generate


@intrinsic
def float_from_pattern(typing_context, pattern):
    """The float64 whose bits are `pattern`."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def pattern_of_float(typing_context, value):
    """The bits of a float64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I64)

    return types.int64(types.float64), generate
