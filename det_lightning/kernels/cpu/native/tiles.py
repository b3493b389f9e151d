"""The tile registers of a processor with AMX: eight of 16 rows of 64 bytes, here all of that one shape.

A process must ask its kernel once for the right to use them (`kernels.cpu.amx`).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _I8.as_pointer()


def _instruction(name: str, registers: int, memory: int):
    """An intrinsic of literal register numbers, then an address and, where `memory` is 2, the bytes between rows."""

    def call(context, builder, signature, arguments):
        numbers = [ir.Constant(_I8, argument.literal_value) for argument in signature.args[:registers]]
        places = list(arguments[registers:])
        if memory:
            places[0] = builder.inttoptr(places[0], _POINTER)
        values = [*numbers, *places]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        known = builder.module.globals.get(f"llvm.x86.{name}")
        builder.call(known or ir.Function(builder.module, kind, f"llvm.x86.{name}"), values)
        return context.get_dummy_value()

    return call


@intrinsic
def tile_configure(typing_context, address):
    """Load the 64 bytes at `address` as the shapes of this thread's tiles."""
    return types.none(types.int64), _instruction("ldtilecfg", 0, 1)


@intrinsic
def tile_release(typing_context):
    """Give the tiles back: the thread's state becomes small again."""
    return types.none(), _instruction("tilerelease", 0, 0)


@intrinsic(prefer_literal=True)
def tile_zero(typing_context, tile):
    return types.none(tile), _instruction("tilezero", 1, 0)


@intrinsic(prefer_literal=True)
def tile_load(typing_context, tile, address, stride):
    """Tile = 16 rows of 64 bytes, `stride` bytes apart."""
    return types.none(tile, types.int64, types.int64), _instruction("tileloadd64", 1, 2)


@intrinsic(prefer_literal=True)
def tile_store(typing_context, tile, address, stride):
    return types.none(tile, types.int64, types.int64), _instruction("tilestored64", 1, 2)


@intrinsic(prefer_literal=True)
def tile_dot(typing_context, total, left, right):
    """total[i, j] += sum over k < 64 of left[i, k] * right[k // 4, j, k % 4], int8 into int32."""
    return types.none(total, left, right), _instruction("tdpbssd", 3, 0)
