"""Means, weighted means and sums over items, whose division waits for the exact sum over the whole global batch.

value = RN(exact sum of the items / exact denominator); the backward pass hands each item the gradient UNDIVIDED.
`exact_mean` outside a strategy has no later division and divides the gradient by the number of items.
"""

from fractions import Fraction

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import InputError
from .digits import det_finalize, digits_value
from .loss import exact_mean as mean_of_all
from .quotient import det_quotient
from .reduction import Dim, det_sum_partial, reduced_dims


class _Undivided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, result):
        ctx.shape = values.shape
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape), None


class _Selected(torch.autograd.Function):
    """values[mask]; what is left out gets no gradient, and its NaN reaches nothing."""

    @staticmethod
    def forward(ctx, values, mask):
        ctx.save_for_backward(mask)
        return values[mask]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        result = torch.zeros(mask.shape, dtype=gradient.dtype, device=gradient.device)
        result[mask] = gradient
        return result, None


def undivided(values: torch.Tensor, digits: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """The quotient of exact sums over one micro-batch, float32 without dimensions; its gradient is not divided.

    Args:
        values: the items, any shape, float32.
        digits: int64 [NB], their exact sum.
        denominator: int64 [NB], what it is divided by; not negative.
    """
    return _Undivided.apply(values, quotient_of(digits, denominator).to(values.device))


def quotient_of(digits: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """RN(value of digits / value of denominator) of two states [NB], float32 without dimensions.

    A denominator that is no finite number makes the canonical NaN.
    """
    number = digits_value(denominator.cpu())
    if not isinstance(number, Fraction):
        return torch.tensor(float("nan"), dtype=torch.float32, device=digits.device)
    return det_quotient(digits, number)


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[kept] the items where `mask` (bool, the same shape) is true; differentiable once."""
    return _Selected.apply(values, mask)


def item_digits(values: torch.Tensor) -> torch.Tensor:
    """int64 [NB]: the exact sum of all items."""
    return det_sum_partial(values.detach().reshape(-1), dim=0)


class _MeanOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims):
        kept = [1 if d in dims else size for d, size in enumerate(x.shape)]
        count = 1
        for d in dims:
            count *= x.shape[d]
        ctx.shape, ctx.kept, ctx.count = x.shape, kept, count
        return det_finalize(det_sum_partial(x.detach(), dim=dims), dtype=x.dtype, denominator=count).view(kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        count = torch.tensor(float(ctx.count), dtype=gradient.dtype, device=gradient.device)
        return (gradient / count).view(ctx.kept).expand(ctx.shape), None


def mean_over(x: torch.Tensor, dim: Dim, *, keepdim: bool = False) -> torch.Tensor:
    """The mean over `dim` (None: all): exact sum, exact count, one rounding; backward RN(g / count). For what holds no
    samples: nothing waits for a global batch here.

    Raises InputError for a dimension that x lacks, or another dtype than float32, bfloat16 or float16.
    """
    dims = reduced_dims("mean_over", x, dim)
    out = _MeanOver.apply(x, dims)
    return out if keepdim else out.view([size for d, size in enumerate(x.shape) if d not in dims])


def exact_mean(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of per-item losses: exact sum, exact count, one rounding. Under `strategy="det"` it is the mean over the
    items of the whole global batch.

    Args:
        values: any shape, one value an item, float32.
        mask: bool of the same shape; False leaves an item out, of the sum and of the count.

    Returns:
        A tensor without dimensions; the mean of nothing is NaN.

    Raises:
        InputError: another dtype, shape or device.
    """
    operands = (values,) if mask is None else (values, mask)
    if has_torch_function(operands):
        return handle_torch_function(exact_mean, operands, values, mask)
    if mask is None:
        return mean_of_all(values)
    check_mask(values, mask)
    return mean_of_all(selected(values, mask))


def check_mask(values: torch.Tensor, mask: torch.Tensor) -> None:
    """Raises InputError unless `mask` says for every item whether it counts."""
    if mask.dtype is not torch.bool or mask.shape != values.shape:
        raise InputError(
            f"exact_mean takes a bool mask of the values' shape {list(values.shape)}, got {mask.dtype} "
            f"{list(mask.shape)}. Write exact_mean(values, mask.bool().expand_as(values))"
        )
    if mask.device != values.device:
        raise InputError(
            f"exact_mean takes values and mask on one device, got values on {values.device} and mask on {mask.device}. "
            f"Write exact_mean(values, mask.to(values.device))"
        )
