"""What loops over many elements need beside Numba's own arithmetic, so that a compiler works on eight at a time.

Numba widens int32 to int64 and fixes the order of float sums; here words stay words, and a sum that is exact in every
order says so.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .memory import _view, stack_intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)


stack_floats = stack_intrinsic(types.float64, ir.DoubleType())
"""stack_floats(count): float64 [count] on the stack, uninitialised, for the time of the kernel's call; a constant."""

stack_float32s = stack_intrinsic(types.float32, ir.FloatType())
"""stack_float32s(count): float32 [count]."""

stack_words = stack_intrinsic(types.int32, _I32)
"""stack_words(count): int32 [count]."""


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
    """total + term, as a step of a sum that the compiler may regroup: every partial sum is exact, or the result is a
    bound with room for roundings."""

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments, flags=("reassoc",))

    return types.float64(types.float64, types.float64), generate


@intrinsic
def multiply_add(typing_context, a, b, c):
    """a * b + c of float32, in one rounding or two as the processor likes: for values where both give what is asked."""

    def generate(context, builder, signature, arguments):
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    return types.float32(types.float32, types.float32, types.float32), generate


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
def smaller_word(typing_context, a, b):
    """The smaller of two int32."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed("<", *arguments), *arguments)

    return types.int32(types.int32, types.int32), generate


@intrinsic
def lowest_place(typing_context, pattern):
    """The place of the lowest bit set of a finite float32 pattern, int32: 1 weighs 2^-149; 2^20 for a zero."""

    def generate(context, builder, signature, arguments):
        field = builder.and_(builder.lshr(arguments[0], ir.Constant(_I32, 23)), ir.Constant(_I32, 255))
        subnormal = builder.icmp_unsigned("==", field, ir.Constant(_I32, 0))
        hidden = builder.select(subnormal, ir.Constant(_I32, 0), ir.Constant(_I32, 1 << 23))
        significand = builder.or_(builder.and_(arguments[0], ir.Constant(_I32, (1 << 23) - 1)), hidden)
        place = builder.add(
            builder.select(subnormal, ir.Constant(_I32, 1), field),
            builder.cttz(significand, ir.Constant(cgutils.bool_t, 0)),
        )
        zero = builder.icmp_unsigned("==", significand, ir.Constant(_I32, 0))
        return builder.select(zero, ir.Constant(_I32, 1 << 20), place)

    return types.int32(types.int32), generate


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

floats_1 = _vector_intrinsic(types.float64)
"""floats_1(address, count): float64 [count]."""


@intrinsic
def prefer_widest_vectors(typing_context):
    """Ask the compiler for 512-bit vectors in the kernel that says this, where the processor has them.

    Its own choice is 256 bits. llvmlite does not know the attribute's name, so it is put past its check.
    """

    def generate(context, builder, signature, arguments):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def square_root(typing_context, value):
    """The float64 nearest to the root of `value`."""

    def generate(context, builder, signature, arguments):
        root = builder.module.declare_intrinsic("llvm.sqrt", [ir.DoubleType()])
        return builder.call(root, arguments)

    return types.float64(types.float64), generate
