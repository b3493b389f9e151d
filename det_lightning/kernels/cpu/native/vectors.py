"""What loops over many elements need beside Numba's own arithmetic, so that a compiler works on eight at a time.

Numba widens int32 to int64 and fixes the order of float sums; here words stay words, and a sum that is exact in every
order says so.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .memory import _view

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic(prefer_literal=True)
def stack_floats(typing_context, count):
    """float64 [count] on the stack, uninitialised, for the time of the kernel's call; `count` is a constant."""
    places = count.literal_value
    array_type = types.Array(types.float64, 1, "C")

    def generate(context, builder, signature, arguments):
        slot = cgutils.alloca_once(builder, ir.ArrayType(ir.DoubleType(), places))
        return _view(context, builder, array_type, builder.ptrtoint(slot, _I64), [ir.Constant(_I64, places)])

    return array_type(count), generate


@intrinsic
def slice_of_floats(typing_context, array, start, count):
    """array[start : start + count] of a float64 vector. Requires: 0 <= start.

    A loop over it from 0 has no index that could be negative, which Python would count from the end.
    """
    array_type = types.Array(types.float64, 1, "C")

    def generate(context, builder, signature, arguments):
        data = context.make_array(array_type)(context, builder, arguments[0]).data
        address = builder.ptrtoint(builder.gep(data, [arguments[1]]), _I64)
        return _view(context, builder, array_type, address, [arguments[2]])

    return array_type(array_type, types.int64, types.int64), generate


@intrinsic
def float_of_float32_pattern(typing_context, pattern):
    """The float64 with the value of a float32 pattern. Requires: no subnormal number (a processor may be set to flush)."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.FloatType()), ir.DoubleType())

    return types.float64(types.int32), generate


@intrinsic
def add_in_any_order(typing_context, total, term):
    """total + term, as a step of a sum whose every partial sum is exact: the compiler may regroup the sum."""

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments, flags=("reassoc",))

    return types.float64(types.float64, types.float64), generate


@intrinsic
def larger_word(typing_context, a, b):
    """The larger of two int32: one instruction for eight of them, where Numba would widen to int64."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed(">", *arguments), *arguments)

    return types.int32(types.int32, types.int32), generate


@intrinsic
def smaller_unsigned_word(typing_context, a, b):
    """The smaller of two int32 read as unsigned."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_unsigned("<", *arguments), *arguments)

    return types.int32(types.int32, types.int32), generate


@intrinsic
def magnitude_word(typing_context, pattern):
    """A float32 pattern without its sign, as int32."""

    def generate(context, builder, signature, arguments):
        return builder.and_(arguments[0], ir.Constant(_I32, 0x7FFFFFFF))

    return types.int32(types.int32), generate


@intrinsic
def one_less_word(typing_context, value):
    """value - 1, modulo 2^32, as int32."""

    def generate(context, builder, signature, arguments):
        return builder.sub(arguments[0], ir.Constant(_I32, 1))

    return types.int32(types.int32), generate


def _vector_intrinsic(dtype):
    array_type = types.Array(dtype, 1, "C")

    def generate(context, builder, signature, arguments):
        return _view(context, builder, array_type, arguments[0], [arguments[1]])

    def of_vector(typing_context, address, count):
        return array_type(types.int64, types.int64), generate

    return intrinsic(of_vector)


bytes_1 = _vector_intrinsic(types.int8)
"""bytes_1(address, count): int8 [count] at an address."""

float32s_1 = _vector_intrinsic(types.float32)
"""float32s_1(address, count): float32 [count]."""


@intrinsic
def square_root(typing_context, value):
    """The float64 nearest to the root of `value`."""

    def generate(context, builder, signature, arguments):
        root = builder.module.declare_intrinsic("llvm.sqrt", [ir.DoubleType()])
        return builder.call(root, arguments)

    return types.float64(types.float64), generate
