"""The first element in which two tensors differ, with both values in hex and decimal and their distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from det_lightning.bisection.bit_values import bits_of, decimal_of, ulps_between


@dataclass(frozen=True)
class ElementDifference:
    """index: of the first differing element in row-major order. count: how many of `size` elements differ.

    reference_bits, candidate_bits: hex; reference, candidate: decimal. ulps: floats of this type between the two, None
    for other types and NaN.
    """

    index: tuple[int, ...]
    count: int
    size: int
    dtype: str
    reference_bits: str
    candidate_bits: str
    reference: str
    candidate: str
    ulps: int | None


def element_difference(reference: numpy.ndarray, candidate: numpy.ndarray, *, dtype: str) -> ElementDifference | None:
    """Compares bits, with every NaN as the canonical one; None if all agree.

    dtype: name of the tensors' type; a bfloat16 tensor is given as its bits in uint16.
    """
    ours, theirs = bits_of(reference, dtype), bits_of(candidate, dtype)
    differing = numpy.flatnonzero(ours != theirs)
    if not len(differing):
        return None
    first = int(differing[0])
    before, after = int(ours[first]), int(theirs[first])
    width = reference.dtype.itemsize
    return ElementDifference(
        index=tuple(int(i) for i in numpy.unravel_index(first, reference.shape)),
        count=len(differing),
        size=reference.size,
        dtype=dtype,
        reference_bits=f"{before:0{2 * width}x}",
        candidate_bits=f"{after:0{2 * width}x}",
        reference=decimal_of(before, dtype, reference.dtype),
        candidate=decimal_of(after, dtype, reference.dtype),
        ulps=ulps_between(before, after, dtype),
    )
