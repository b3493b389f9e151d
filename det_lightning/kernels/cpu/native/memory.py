"""Arrays over addresses, and small arrays on the stack of a kernel.

`numba.carray` would do, but with the runtime's reference counts around every use; these views own nothing.
"""

from llvmlite import ir
from numba import types
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


def stack_intrinsic(dtype, item):
    """An intrinsic that takes a constant count and gives an uninitialised array on the stack, for the kernel's call."""
    array_type = types.Array(dtype, 1, "C")

    def generate(context, builder, signature, arguments):
        places = signature.args[0].literal_value
        with builder.goto_entry_block():  # not cgutils.alloca_once, which fills it with zeros
            slot = builder.alloca(ir.ArrayType(item, places))
        return _view(context, builder, array_type, builder.ptrtoint(slot, _I64), [ir.Constant(_I64, places)])

    def on_stack(typing_context, count):
        return array_type(count), generate

    return intrinsic(prefer_literal=True)(on_stack)


stack_integers = stack_intrinsic(types.int64, _I64)
"""stack_integers(count): int64 [count] on the stack, uninitialised, for the time of the kernel's call; a constant."""
