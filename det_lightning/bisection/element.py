"""The first element in which two tensors differ, with both values in hex and decimal and their distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from det_lightning.bisection.bit_values import bits_of, decimal_of, ulps_between


@dataclass(frozen=True)
class ElementPair:
    """One element of two tensors.

    index: of the element, one number per dimension. reference_bits, candidate_bits: hex; reference, candidate: decimal.
    ulps: floats of this type between the two, None for other types and NaN.
    """

    index: tuple[int, ...]
    dtype: str
    reference_bits: str
    candidate_bits: str
    reference: str
    candidate: str
    ulps: int | None


@dataclass(frozen=True)
class ElementDifference(ElementPair):
    """The first element, in row-major order, in which two tensors differ. count: how many of `size` elements differ."""

    count: int
    size: int


def pair_fields(array: numpy.ndarray, place: int, before: int, after: int, dtype: str) -> dict[str, Any]:
    """The fields of an ElementPair for the bits of element number `place`; array: of the tensors' shape and item type."""
    width = 2 * array.dtype.itemsize
    return {
        "index": tuple(int(i) for i in numpy.unravel_index(place, array.shape)),
        "dtype": dtype,
        "reference_bits": f"{before:0{width}x}",
        "candidate_bits": f"{after:0{width}x}",
        "reference": decimal_of(before, dtype, array.dtype),
        "candidate": decimal_of(after, dtype, array.dtype),
        "ulps": ulps_between(before, after, dtype),
    }


def element_difference(reference: numpy.ndarray, candidate: numpy.ndarray, *, dtype: str) -> ElementDifference | None:
    """Compares bits, with every NaN as the canonical one; None if all agree.

    dtype: name of the tensors' type; a bfloat16 tensor is given as its bits in uint16.
    """
    ours, theirs = bits_of(reference, dtype), bits_of(candidate, dtype)
    differing = numpy.flatnonzero(ours != theirs)
    if not len(differing):
        return None
    first = int(differing[0])
    pair = pair_fields(reference, first, int(ours[first]), int(theirs[first]), dtype)
    return ElementDifference(**pair, count=len(differing), size=reference.size)
