"""relu(x) = x if x > 0, the canonical NaN if x is NaN, else +0. Backward: g where x > 0 or x is NaN, else +0."""

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from .canonical import canonical_nan


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        passes = ~(x <= 0)
        ctx.save_for_backward(passes)
        return canonical_nan(torch.where(passes, x, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (passes,) = ctx.saved_tensors
        return canonical_nan(torch.where(passes, gradient, 0.0))


def relu(x: torch.Tensor) -> torch.Tensor:
    """The rectifier on a floating-point tensor of any shape; exact, so in every format the same."""
    if has_torch_function((x,)):
        return handle_torch_function(relu, (x,), x)
    return _Relu.apply(x)
