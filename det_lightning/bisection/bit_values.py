"""Bits of one element of a tensor, told to people: decimal text, and the distance of two floats in ulps."""

from __future__ import annotations

import struct

import numpy

# dtype name: (bits, bits of infinity, bits of the canonical NaN)
_FLOATS = {
    "float16": (16, 0x7C00, 0x7E00),
    "bfloat16": (16, 0x7F80, 0x7FC0),
    "float32": (32, 0x7F800000, 0x7FC00000),
    "float64": (64, 0x7FF << 52, 0x7FF8 << 48),
}


def bits_of(array: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """Flat unsigned integers of the elements, row-major, every NaN canonical; complex numbers as 64 or 128 bits are cut
    to their first 64.
    """
    flat = numpy.ascontiguousarray(array).reshape(-1)
    width = min(flat.dtype.itemsize, 8)
    bits = flat.view(f"<u{width}")
    if flat.dtype.itemsize > 8:
        bits = bits[:: flat.dtype.itemsize // 8]
    if dtype in _FLOATS:
        size, infinity, canonical = _FLOATS[dtype]
        magnitude = bits & bits.dtype.type((1 << size - 1) - 1)
        bits = numpy.where(magnitude > bits.dtype.type(infinity), bits.dtype.type(canonical), bits)
    return bits


def decimal_of(bits: int, dtype: str, array_type: numpy.dtype) -> str:
    """The element in decimal, as short as tells it from its neighbours."""
    if dtype == "bfloat16":
        value = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
        return f"{value:.4g}"
    element = numpy.frombuffer(bits.to_bytes(array_type.itemsize, "little"), array_type.newbyteorder("<"))[0]
    return str(element)


def ulps_between(one: int, other: int, dtype: str) -> int | None:
    """How many floats of this type lie between two, given as bits; None for other types and for NaN."""
    if dtype not in _FLOATS:
        return None
    width, infinity, _ = _FLOATS[dtype]
    sign = 1 << width - 1
    magnitudes = [bits & sign - 1 for bits in (one, other)]
    if max(magnitudes) > infinity:
        return None
    places = [-m if bits & sign else m for m, bits in zip(magnitudes, (one, other), strict=True)]
    return abs(places[1] - places[0])
