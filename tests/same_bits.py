"""Equality of bytes: the only comparison that tests of this project make on numbers."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element, after every NaN became the canonical one; complex numbers as their two parts."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full((), float("nan"), dtype=tensor.dtype), tensor)
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def ulps_between(a: int, b: int, bits: int) -> int:
    """Steps between two float patterns (signed integers) on the line of all floats; -0 and +0 are one step apart."""
    lowest = -(1 << (bits - 1))
    ordered = [p if p >= 0 else lowest - p - 1 for p in (a, b)]
    return abs(ordered[0] - ordered[1])


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Fail unless `a` and `b` have one dtype, one shape and the same bytes. NaNs are equal, signs of zero count.

    The message names the first differing element: index, both values in hex and decimal, their distance in ulps.
    """
    assert a.dtype == b.dtype, f"dtypes differ: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"shapes differ: {list(a.shape)} and {list(b.shape)}"
    left, right = _patterns(a), _patterns(b)
    differing = (left != right).nonzero()
    if len(differing) == 0:
        return
    index = tuple(differing[0].tolist())
    bits = 8 * left.element_size()
    p, q = int(left[index]), int(right[index])
    value_index = index[: a.dim()]
    message = (
        f"{len(differing)} of {left.numel()} elements differ; first at {list(index)}: "
        f"{p & (1 << bits) - 1:#0{bits // 4 + 2}x} ({a[value_index].item()!r}) and "
        f"{q & (1 << bits) - 1:#0{bits // 4 + 2}x} ({b[value_index].item()!r})"
    )
    if a.is_floating_point():
        message += f", {ulps_between(p, q, bits)} ulps apart"
    raise AssertionError(message)
