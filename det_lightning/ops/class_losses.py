"""Losses over classes in full: class weights, label smoothing, class probabilities; log-probabilities as input.

Per row with logits x, target t, class weights w (1 without), smoothing e, C classes; every line one rounding a step:
    m = max_j x_j;  d_j = RN(x_j - m);  e_j = exp(d_j);  s = RN(sum e_j);  u_j = RN(log(s) - d_j);  p_j = RN(e_j / s)
    a = RN(w_t u_t);   S = RN(exact sum of w_c u_c);   loss = a, or RN(RN(RN(1 - e) a) + RN(RN(e / C) S))
    f'_j = A_j = RN(w_t RN(p_j - [j = t])), or RN(RN(RN(1 - e) A_j) + RN(RN(e / C) RN(RN(p_j W) - w_j))), W = RN(sum w)
  class probabilities y:  y_c = RN(RN(y_c RN(1 - e)) + RN(e / C)) if e;  r_c = RN(w_c y_c);
    loss = RN(exact sum of r_c u_c);   f'_j = RN(RN(p_j R) - r_j), R = RN(exact sum of r_c)
  nll:      RN(-w_t x_t);            f' = -w_t at t, else 0
  kl_div:   RN(RN(y log y) - RN(y x)), 0 log 0 = 0;  f' = -y;    log_target: RN(exp(y) RN(y - x));  f' = -exp(y)
  log_softmax: y_j = RN(d_j - log(s));  backward RN(g_j - RN(p_j RN(sum g)))
The backward pass is RN(g f'). Rows whose target is ignored have loss 0 and gradient 0.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError
from .canonical import canonical_nan
from .dot import det_dot
from .elementary import det_exp, det_log
from .reduction import det_sum


class _Items(torch.autograd.Function):
    """Items [M] or of x's shape, with their derivative of x's shape; `ignored` [M]: rows without gradient, or None."""

    @staticmethod
    def forward(ctx, x, items, derivative, ignored):
        ctx.save_for_backward(derivative, ignored)
        return canonical_nan(items)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        derivative, ignored = ctx.saved_tensors
        gradient = gradient if gradient.dim() == derivative.dim() else gradient.unsqueeze(1)
        product = canonical_nan(gradient * derivative)
        return product if ignored is None else torch.where(ignored.unsqueeze(1), 0.0, product), None, None, None


def class_items(
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    log_probabilities: bool = False,
) -> Tensor:
    """The cross-entropy (nll with `log_probabilities`) of each row with class indices, not reduced.

    Args:
        x: [M, C] float32 logits or log-probabilities.
        target: [M] int64, in [0, C) or ignore_index.
        weight: [C] float32, not negative, without gradient.

    Returns:
        [M] float32, 0 where the target is ignored.

    Raises:
        InputError: shapes, dtypes, weights or class indices that do not fit.
    """
    _check_rows(x, weight, label_smoothing)
    if target.dim() != 1 or len(target) != len(x) or target.dtype is not torch.int64:
        raise InputError(
            f"class indices are int64 [{len(x)}], one a row of the logits; got {target.dtype} {list(target.shape)}"
        )
    ignored = target == ignore_index
    outside = ((target < 0) | (target >= x.shape[1])) & ~ignored
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise InputError(
            f"target[{place}] = {int(target[place])} is outside [0, {x.shape[1]}) and is not ignore_index = {ignore_index}"
        )
    values = x.detach()
    place = torch.where(ignored, 0, target).unsqueeze(1)
    chosen_weight = torch.ones_like(values[:, 0]) if weight is None else weight[place.squeeze(1)]
    if log_probabilities:
        items = -(values.gather(1, place).squeeze(1) * chosen_weight)
        derivative = torch.zeros_like(values).scatter_(1, place, -chosen_weight.unsqueeze(1))
    else:
        surprise, probability = _surprise(values)
        items = surprise.gather(1, place).squeeze(1) * chosen_weight
        one_hot = torch.zeros_like(values).scatter_(1, place, 1.0)
        derivative = chosen_weight.unsqueeze(1) * (probability - one_hot)
        if label_smoothing:
            keep, share = _number(1.0 - label_smoothing, values), _number(label_smoothing / x.shape[1], values)
            weights = values.new_ones(x.shape[1]) if weight is None else weight
            spread = det_dot(surprise, weights) if weight is not None else det_sum(surprise, dim=1)
            items = keep * items + share * spread
            derivative = keep * derivative + share * (probability * det_sum(weights) - weights)
    return _Items.apply(x, torch.where(ignored, 0.0, items), derivative, ignored)


def probability_items(
    x: Tensor, target: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The cross-entropy [M] of each row of logits [M, C] with class probabilities [M, C], not reduced."""
    _check_rows(x, weight, label_smoothing)
    if target.shape != x.shape or target.dtype is not torch.float32 or target.requires_grad:
        raise InputError(
            f"class probabilities are float32 {list(x.shape)} without gradient, as the logits; got {target.dtype} "
            f"{list(target.shape)}"
        )
    if label_smoothing:
        share = _number(label_smoothing / x.shape[1], target)
        target = target * _number(1.0 - label_smoothing, target) + share
    portion = target if weight is None else target * weight
    surprise, probability = _surprise(x.detach())
    derivative = probability * det_sum(portion, dim=1).unsqueeze(1) - portion
    return _Items.apply(x, det_dot(surprise, portion), derivative, None)


def kl_items(x: Tensor, target: Tensor, *, log_target: bool = False) -> Tensor:
    """The terms of the Kullback-Leibler divergence, elementwise: x log-probabilities, target (log-)probabilities."""
    if x.dtype is not torch.float32 or target.dtype is not torch.float32 or x.shape != target.shape:
        raise InputError(
            f"kl_div takes float32 log-probabilities and targets of one shape, got {x.dtype} {list(x.shape)} and "
            f"{target.dtype} {list(target.shape)}"
        )
    if target.requires_grad:
        raise InputError("the targets of kl_div require a gradient; detach them")
    values = x.detach()
    if log_target:
        probability = det_exp(target)
        items = probability * (target - values)
    else:
        probability = target
        items = torch.where(target == 0, 0.0, target * det_log(target)) - target * values
    return _Items.apply(x, items, -probability, None)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        shifted = x - x.amax(dim=1, keepdim=True)
        exponentials = det_exp(shifted)
        total = det_sum(exponentials, dim=1).unsqueeze(1)
        ctx.save_for_backward(exponentials / total)
        return canonical_nan(shifted - det_log(total))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (probability,) = ctx.saved_tensors
        return canonical_nan(gradient - probability * det_sum(gradient, dim=1).unsqueeze(1))


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """log of the softmax over `dim`, float32; differentiable once. Each slice is a sequence of its own elements."""
    if x.dtype is not torch.float32 or x.dim() == 0 or x.shape[dim] == 0:
        raise InputError(
            f"log_softmax takes float32 with at least one element along dim, got {x.dtype} {list(x.shape)}"
        )
    last = x.movedim(dim, -1)
    rows = _LogSoftmax.apply(last.reshape(last.shape[:-1].numel(), last.shape[-1]))
    return rows.reshape(last.shape).movedim(-1, dim)


def _surprise(x: Tensor) -> tuple[Tensor, Tensor]:
    """([M, C] -log p, [M, C] p) of rows of logits."""
    shifted = x - x.amax(dim=1, keepdim=True)
    exponentials = det_exp(shifted)
    total = det_sum(exponentials, dim=1).unsqueeze(1)
    return det_log(total) - shifted, exponentials / total


def _number(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _check_rows(x: Tensor, weight: Tensor | None, label_smoothing: float) -> None:
    if x.dim() != 2 or x.dtype is not torch.float32 or x.shape[1] == 0:
        raise InputError(f"this loss takes float32 rows [M, C >= 1], got {x.dtype} {list(x.shape)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing is {label_smoothing}; it must be in [0, 1]")
    if weight is None:
        return
    if weight.shape != x.shape[1:] or weight.dtype is not torch.float32 or weight.requires_grad:
        raise InputError(
            f"class weights are float32 [{x.shape[1]}] without gradient, got {weight.dtype} {list(weight.shape)}"
        )
    check_divisors(weight)


def check_divisors(weight: Tensor) -> None:
    """Raises InputError unless the sum of these weights can be divided by."""
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise InputError("weights of this loss must be finite and not negative: they are added up to divide by")
