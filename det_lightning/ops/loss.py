"""Losses as per-item values, and the mean that is divided only once.

cross_entropy, per row with target t:
    m = max_j x_j;  d_j = RN(x_j - m);  e_j = exp(d_j);  s = RN(sum_j e_j);  loss = RN(log(s) - d_t)
    backward: p_j = RN(e_j / s);  g_j = RN(g RN(p_j - [j = t]))
    0, and gradients of 0, in rows whose target is ignored
exact_mean(v) = RN(sum v / n) with the exact sum; its backward passes the gradient through UNDIVIDED: the division
by the number of items of the whole global batch comes once, after the exact sum over all of them.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import InputError
from .canonical import canonical_nan
from .digits import det_finalize
from .elementary import det_exp, det_log
from .reduction import det_sum, det_sum_partial


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignored):
        target = torch.where(ignored, 0, target)
        shifted = logits - logits.amax(dim=1, keepdim=True)
        exponentials = det_exp(shifted)
        total = det_sum(exponentials, dim=1)
        chosen = shifted.gather(1, target.unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(exponentials, total, target, ignored)
        return canonical_nan(torch.where(ignored, 0.0, det_log(total) - chosen))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        exponentials, total, target, ignored = ctx.saved_tensors
        difference = exponentials / total.unsqueeze(1)
        one_hot = torch.zeros_like(difference).scatter_(1, target.unsqueeze(1), 1.0)
        product = canonical_nan(gradient.unsqueeze(1) * (difference - one_hot))
        return torch.where(ignored.unsqueeze(1), 0.0, product), None, None


def cross_entropy_items(logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int | None = None) -> torch.Tensor:
    """The cross-entropy of each row, not reduced; differentiable once.

    Args:
        logits: [M, C] float32, C >= 1.
        target: [M] int64 class indices in [0, C), or ignore_index.
        ignore_index: rows with this target get the loss 0 and no gradient.

    Returns:
        [M] float32.

    Raises:
        InputError: another shape or dtype, or a class index out of range.
    """
    if logits.dim() != 2 or target.dim() != 1 or len(logits) != len(target) or target.dtype != torch.int64:
        raise InputError(
            f"cross_entropy takes logits [M, C] and int64 class indices [M]; got logits {tuple(logits.shape)} and "
            f"target {target.dtype} {tuple(target.shape)}. Reshape to one row an item; class probabilities are not covered"
        )
    if logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise InputError(f"cross_entropy takes float32 logits [M, C >= 1]; got {logits.dtype} {tuple(logits.shape)}")
    ignored = target == ignore_index if ignore_index is not None else torch.zeros_like(target, dtype=torch.bool)
    outside = ((target < 0) | (target >= logits.shape[1])) & ~ignored
    if outside.any():
        place = int(outside.nonzero()[0])
        raise InputError(
            f"cross_entropy: target[{place}] = {int(target[place])} is outside [0, {logits.shape[1]})"
            + ("" if ignore_index is None else f" and is not ignore_index = {ignore_index}")
        )
    return _CrossEntropy.apply(logits, target, ignored)


class _ExactMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.shape = values.shape
        digits = det_sum_partial(values.reshape(-1), dim=0)
        return det_finalize(digits, dtype=values.dtype, denominator=values.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


class _DividedMean(_ExactMean):
    """Outside a strategy there is no later division: the gradient is divided here."""

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        count = 1
        for size in ctx.shape:
            count *= size
        divisor = torch.tensor(float(count), dtype=gradient.dtype, device=gradient.device)
        return (gradient / divisor).expand(ctx.shape)


def exact_mean(values: torch.Tensor, *, undivided: bool = False) -> torch.Tensor:
    """The mean of per-item losses: exact sum, exact count, one rounding.

    Args:
        values: any shape, one value an item, float32.
        undivided: the backward pass hands each item the whole gradient; the caller divides the finished exact sum.
            Under `strategy="det"` this is so without asking, and the mean is the one over the global batch.

    Returns:
        A tensor without dimensions.

    Raises:
        InputError: a dtype that is not float32.
    """
    if has_torch_function((values,)):
        return handle_torch_function(exact_mean, (values,), values, undivided=undivided)
    if values.dtype != torch.float32:
        raise InputError(f"exact_mean takes float32 values, got {values.dtype}")
    return (_ExactMean if undivided else _DividedMean).apply(values)
