"""linear(x, w, b)[i, j] = RN(sum_k x[i, k] w[j, k] + b[j]): the bias is one more term of the exact sum.

Backward: gx = RN(g w), gw = RN(g^T x), gb = RN(sum_i g[i]), each one exact sum rounded once; or, with an accumulator,
the exact digits of gw and gb are added into it and nothing is rounded here.
"""

from typing import Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import InputError
from .gemm import add_gemm_digits, det_gemm
from .reduction import add_sum_digits, det_sum


class DigitSink(Protocol):
    """Where a backward pass leaves the exact digits of parameter gradients."""

    def digits(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """int64 [*parameter.shape, NB] to add into, or None: this micro-batch has weight zero."""

    def added(self, parameter: torch.Tensor) -> None:
        """What `digits` handed out last has been added to."""

    def add_product(self, parameter: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        """Adds x @ w.T, of the parameter's shape, to its digits or to what stands for them."""
        if (digits := self.digits(parameter)) is not None:
            add_gemm_digits(digits, x, w)
            self.added(parameter)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, sink):
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.sink = bias, sink
        return det_gemm(x, weight, bias, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = det_gemm(upstream, weight.t(), dtype=x.dtype) if needs_x else None
        grad_weight = grad_bias = None
        if ctx.sink is None:
            if needs_weight:
                grad_weight = det_gemm(upstream.t(), x.t(), dtype=weight.dtype)
            if needs_bias:
                grad_bias = det_sum(upstream, dim=0, dtype=ctx.bias.dtype)
        else:
            if needs_weight:
                ctx.sink.add_product(weight, upstream.t(), x.t())
            if needs_bias and (digits := ctx.sink.digits(ctx.bias)) is not None:
                add_sum_digits(digits, upstream, dim=0)
                ctx.sink.added(ctx.bias)
        return grad_x, grad_weight, grad_bias, None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, sink: DigitSink | None = None
) -> torch.Tensor:
    """x w^T + b, each output one exact sum rounded once; differentiable once.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K], the same dtype.
        bias: [N], the same dtype, or None.
        sink: receives the digits of the weight's and the bias's gradients, which are then not returned to autograd.

    Returns:
        [..., N] in x's dtype.

    Raises:
        InputError: shapes or dtypes that do not fit, with both named.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(linear, (x, weight), x, weight, bias, sink=sink)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"linear multiplies x [..., K] by weight [N, K]; got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"linear needs a bias of shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    dtypes = [each.dtype for each in (x, weight, bias) if each is not None]
    if len(set(dtypes)) > 1:
        raise InputError(f"linear takes x, weight and bias of one dtype, got {', '.join(map(str, dtypes))}")
    # The rows are made outside the function: an in-place operation may not touch a view that was made inside one.
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if sink is None and torch.compiler.is_compiling():
        out = torch.ops.det_lightning.linear(rows, weight, bias)
    else:
        out = _Linear.apply(rows, weight, bias, sink)
    return out.reshape(*x.shape[:-1], weight.shape[0])
