"""Exact sums: out = round(sum of the elements), one rounding; sums of squares as digits."""

import torch

from ..arithmetic.formats import NB
from ..errors import InputError
from ..kernels.dispatch import check_tensor, kernels_of
from .digits import check_states, output_form
from .registration import is_traced

Dim = int | tuple[int, ...] | list[int] | None


def reduced_dims(operation: str, x: torch.Tensor, dim: Dim) -> list[int]:
    """The dimensions that `dim` names, sorted; raises InputError for one that x lacks or that comes twice."""
    if dim is None:
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    span = max(x.dim(), 1)
    for d in dims:
        if not isinstance(d, int) or not -span <= d < span:
            raise InputError(f"{operation}: dim is {dim!r}; x is {list(x.shape)}, so each must be in [{-span}, {span})")
    reduced = [d % span for d in dims]
    if len(set(reduced)) != len(reduced):
        raise InputError(f"{operation}: dim is {dim!r}; each dimension may be named once")
    return [] if x.dim() == 0 else sorted(reduced)


def as_list(dim: Dim) -> list[int] | None:
    """The argument `dim` in the form that a custom op takes."""
    return [dim] if isinstance(dim, int) else None if dim is None else list(dim)


def det_sum_partial(x: torch.Tensor, dim: Dim = None) -> torch.Tensor:
    """The exact sums over `dim` (None: all) as canonical digits: int64 [*kept sizes, NB].

    x: float32, bfloat16 or float16, any strides; an empty sum is zero. Raises InputError for another dtype, device or
    dimension.
    """
    if is_traced(x):
        return torch.ops.det_lightning.sum_partial(x, as_list(dim))
    return compute_sum_partial(x, dim)


def compute_sum_partial(x: torch.Tensor, dim: Dim) -> torch.Tensor:
    """`det_sum_partial` on a plain tensor."""
    check_tensor("det_sum_partial", "x", x)
    return _sum_states("det_sum_partial", x, dim)


def _sum_states(operation: str, x: torch.Tensor, dim: Dim) -> torch.Tensor:
    reduced = reduced_dims(operation, x, dim)
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [x.shape[d] for d in kept]
    # One block of reduced dimensions stays where it lies: [outer, n, inner]. Others are moved to the end.
    if reduced and reduced[-1] - reduced[0] != len(reduced) - 1:
        x = x.permute(*kept, *reduced)
        first = len(kept)
    else:
        first = reduced[0] if reduced else x.dim()
    sizes = list(x.shape)
    count = len(reduced)
    outer, n, inner = (_product(s) for s in (sizes[:first], sizes[first : first + count], sizes[first + count :]))
    return kernels_of("reduction").sum_states(x.reshape(outer, n, inner)).view(*shape, NB)


def _product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def add_sum_digits(digits: torch.Tensor, x: torch.Tensor, dim: Dim = None) -> None:
    """digits += the sums of `x` over `dim`, exactly and in place. digits: int64 [*kept sizes, NB], any state."""
    if is_traced(x, digits):
        torch.ops.det_lightning.add_sum_digits(digits, x, as_list(dim))
    else:
        compute_add_sum_digits(digits, x, dim)


def compute_add_sum_digits(digits: torch.Tensor, x: torch.Tensor, dim: Dim) -> None:
    """`add_sum_digits` on plain tensors."""
    check_tensor("add_sum_digits", "x", x)
    check_states("add_sum_digits", "digits", digits)
    states = _sum_states("add_sum_digits", x, dim)
    if digits.shape != states.shape:
        raise InputError(
            f"add_sum_digits: digits is {list(digits.shape)}; for x {list(x.shape)} and dim {dim!r} it must be "
            f"{list(states.shape)}"
        )
    digits += states


def det_sum(
    x: torch.Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The correctly rounded sum over `dim` (None: all elements).

    x: float32, bfloat16 or float16, any strides. Returns `dtype` (None: the dtype of x). An exact zero and an empty
    sum are +0. Raises InputError for another dtype, device or dimension.
    """
    if is_traced(x):
        return torch.ops.det_lightning.sum(x, as_list(dim), keepdim, dtype)
    return compute_sum(x, dim, keepdim, dtype)


def compute_sum(x: torch.Tensor, dim: Dim, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """`det_sum` on a plain tensor, unseen by autograd."""
    check_tensor("det_sum", "x", x)
    form = output_form("det_sum", x.dtype if dtype is None else dtype)
    states = _sum_states("det_sum", x, dim)
    out = kernels_of("reduction").finalize(states, form, 1)
    if keepdim:
        reduced = reduced_dims("det_sum", x, dim)
        out = out.view([1 if d in reduced else size for d, size in enumerate(x.shape)])
    return out


def sum_of_squares_partial(x: torch.Tensor) -> torch.Tensor:
    """The exact sum of squares of all elements as one canonical state: int64 [NB]. Errors as for `det_sum`."""
    check_tensor("sum_of_squares_partial", "x", x)
    return kernels_of("reduction").sum_of_squares_state(x)
