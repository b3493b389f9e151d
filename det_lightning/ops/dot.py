"""Means, inner products and sums of squares: each one exact sum, divided by an exact count and rounded once."""

import torch

from ..arithmetic.formats import NB
from ..errors import InputError
from ..kernels.dispatch import check_tensor, kernels_of
from .digits import det_finalize, output_form
from .reduction import Dim, det_sum_partial, reduced_dims


def _keep_dims(operation: str, out: torch.Tensor, x: torch.Tensor, dim: Dim) -> torch.Tensor:
    reduced = reduced_dims(operation, x, dim)
    return out.view([1 if d in reduced else size for d, size in enumerate(x.shape)])


def det_mean(
    x: torch.Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """round(exact sum over `dim` / number of elements), one rounding; the mean of nothing is the canonical NaN.

    Arguments, result and errors as for `det_sum`.
    """
    check_tensor("det_mean", "x", x)
    output_form("det_mean", x.dtype if dtype is None else dtype)
    count = 1
    for d in reduced_dims("det_mean", x, dim):
        count *= x.shape[d]
    out = det_finalize(det_sum_partial(x, dim), dtype=x.dtype if dtype is None else dtype, denominator=count)
    return _keep_dims("det_mean", out, x, dim) if keepdim else out


def sum_of_squares_digits(x: torch.Tensor, dim: Dim = None) -> torch.Tensor:
    """The exact sums of squares over `dim` (None: all) as canonical digits: int64 [*kept sizes, NB]."""
    check_tensor("sum_of_squares_digits", "x", x)
    reduced = reduced_dims("sum_of_squares_digits", x, dim)
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [x.shape[d] for d in kept]
    rows = x.permute(*kept, *reduced).reshape(torch.Size(shape).numel(), -1 if x.numel() else 0)
    return kernels_of("binned_sum").sum_rows("squares", rows).view(*shape, NB)


def det_sum_of_squares(
    x: torch.Tensor, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """round(exact sum of x^2 over `dim`), one rounding. Arguments, result and errors as for `det_sum`."""
    digits = sum_of_squares_digits(x, dim)
    out = det_finalize(digits, dtype=x.dtype if dtype is None else dtype)
    return _keep_dims("det_sum_of_squares", out, x, dim) if keepdim else out


def dot_digits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The exact sums over the last dimension of a * b as canonical digits: int64 [*sizes, NB].

    a, b: [*sizes, K], the leading dimensions broadcast; float32, bfloat16 or float16, any strides.
    """
    check_tensor("dot_digits", "a", a)
    check_tensor("dot_digits", "b", b)
    if a.dim() == 0 or b.dim() == 0 or a.shape[-1] != b.shape[-1]:
        raise InputError(
            f"dot_digits: a is {list(a.shape)} and b is {list(b.shape)}; both must end in the same dimension, the one "
            f"that is summed"
        )
    try:
        sizes = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    except RuntimeError as error:
        raise InputError(
            f"dot_digits: a is {list(a.shape)} and b is {list(b.shape)}; their leading dimensions do not broadcast"
        ) from error
    rows = [t.expand(*sizes, t.shape[-1]).reshape(sizes.numel(), t.shape[-1]) for t in (a, b)]
    return kernels_of("binned_sum").sum_rows("products", *rows).view(*sizes, NB)


def det_dot(a: torch.Tensor, b: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """round(sum over the last dimension of a * b), one rounding to `dtype` (None: float32).

    a, b: [*sizes, K], leading dimensions broadcast. Returns [*sizes]. Infinity times zero counts as NaN; an empty sum
    is +0. Raises InputError for other dtypes, devices or shapes.
    """
    return det_finalize(dot_digits(a, b), dtype=torch.float32 if dtype is None else dtype)
