"""Arrays over addresses, and small arrays on the stack of a kernel.

`numba.carray` would do, but with the runtime's reference counts around every use; these views own nothing.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_I64 = ir.IntType(64)


def _view(context, builder, array_type, address, shape):
    """A row-major array of `array_type` at `address`."""
    item_bytes = array_type.dtype.bitwidth // 8
    strides, step = [], ir.Constant(_I64, item_bytes)
    for size in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, size)
    array = context.make_array(array_type)(context, builder)
    pointer = builder.inttoptr(address, context.get_data_type(array_type.dtype).as_pointer())
    populate_array(
        array, data=pointer, shape=shape, strides=strides, itemsize=ir.Constant(_I64, item_bytes), meminfo=None
    )
    return array._getvalue()


def _view_intrinsic(dtype, dimensions: int):
    array_type = types.Array(dtype, dimensions, "C")

    def generate(context, builder, signature, arguments):
        return _view(context, builder, array_type, arguments[0], list(arguments[1:]))

    def of_vector(typing_context, address, count):
        return array_type(types.int64, types.int64), generate

    def of_matrix(typing_context, address, rows, columns):
        return array_type(types.int64, types.int64, types.int64), generate

    return intrinsic(of_vector if dimensions == 1 else of_matrix)


words_1 = _view_intrinsic(types.int32, 1)
"""words_1(address, count): int32 [count] at an address."""

words_2 = _view_intrinsic(types.int32, 2)
"""words_2(address, rows, columns): int32 [rows, columns], row-major."""

integers_1 = _view_intrinsic(types.int64, 1)
"""integers_1(address, count): int64 [count]."""

integers_2 = _view_intrinsic(types.int64, 2)
"""integers_2(address, rows, columns): int64 [rows, columns], row-major."""


floats_2 = _view_intrinsic(types.float64, 2)
"""floats_2(address, rows, columns): float64 [rows, columns], row-major."""


@intrinsic(prefer_literal=True)
def stack_integers(typing_context, count):
    """int64 [count] on the stack, uninitialised, for the time of the kernel's call; `count` is a constant."""
    places = count.literal_value
    array_type = types.Array(types.int64, 1, "C")

    def generate(context, builder, signature, arguments):
        slot = cgutils.alloca_once(builder, ir.ArrayType(_I64, places))
        return _view(context, builder, array_type, builder.ptrtoint(slot, _I64), [ir.Constant(_I64, places)])

    return array_type(count), generate
