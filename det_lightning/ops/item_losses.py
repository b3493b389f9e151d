"""Losses of one prediction and one target each, not reduced. d = RN(x - y), every line one rounding a step:

    mse          RN(d d)                                          f' = 2 d
    l1           |d|                                              f' = sign(d), 0 at 0
    smooth_l1    RN(RN(RN(d d) / 2) / beta) if |d| < beta, else RN(|d| - RN(beta / 2))      f' = RN(d / beta), else sign(d)
    huber        RN(RN(d d) / 2) if |d| <= delta, else RN(delta RN(|d| - RN(delta / 2)))    f' = d, else RN(delta sign(d))
    bce_logits   RN(RN(max(x, 0) - RN(x y)) + log(RN(1 + e))), e = exp(-|x|)
                 f' = RN(s - y), s = RN(1 / RN(1 + e)) if x >= 0, else RN(e / RN(1 + e))
      with pos_weight p: q = RN(RN(RN(p - 1) y) + 1), n = RN(e / RN(1 + e)) if x >= 0, else RN(1 / RN(1 + e))
                 RN(RN(RN(1 - y) x) + RN(q RN(max(-x, 0) + log(RN(1 + e)))))     f' = RN(RN(1 - y) - RN(q n))
    bce          RN(-RN(RN(y max(log x, -100)) + RN(RN(1 - y) max(log RN(1 - x), -100))))
                 f' = RN(RN(x - y) / max(RN(x RN(1 - x)), 2^-40))
    with weights w the item is RN(w item), its derivative RN(w f').
The backward pass is RN(g f'): the product of the gradient that arrives and the derivative, rounded once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError
from .canonical import canonical_nan
from .elementary import det_exp, det_log

_LOG_FLOOR = -100.0
_DIVISOR_FLOOR = 2.0**-40


def _mse(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    difference = x - y
    return difference * difference, difference * 2.0


def _l1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    difference = x - y
    return difference.abs(), difference.sign()


def _smooth_l1(x: Tensor, y: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    if beta == 0.0:
        return _l1(x, y)
    difference = x - y
    inside = difference.abs() < beta
    items = torch.where(inside, difference * difference * 0.5 / _like(beta, x), difference.abs() - _like(0.5 * beta, x))
    return items, torch.where(inside, difference / _like(beta, x), difference.sign())


def _huber(x: Tensor, y: Tensor, delta: float = 1.0) -> tuple[Tensor, Tensor]:
    difference = x - y
    inside = difference.abs() <= delta
    outer = _like(delta, x) * (difference.abs() - _like(0.5 * delta, x))
    items = torch.where(inside, difference * difference * 0.5, outer)
    return items, torch.where(inside, difference, _like(delta, x) * difference.sign())


def _bce_logits(x: Tensor, y: Tensor, positive: Tensor | None = None) -> tuple[Tensor, Tensor]:
    exponential = det_exp(-x.abs())
    one_more = exponential + 1.0
    if positive is not None:
        factor, rest = (positive - 1.0) * y + 1.0, 1.0 - y
        negative_probability = torch.where(x >= 0, exponential, 1.0) / one_more
        items = rest * x + factor * (torch.where(x < 0, -x, 0.0) + det_log(one_more))
        return torch.where(x.isnan(), x, items), torch.where(x.isnan(), x, rest - factor * negative_probability)
    items = (torch.where(x > 0, x, 0.0) - x * y) + det_log(one_more)
    probability = torch.where(x >= 0, 1.0 / one_more, exponential / one_more)
    return torch.where(x.isnan(), x, items), torch.where(x.isnan(), x, probability - y)


def _bce(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if bool(((x < 0) | (x > 1)).any()):
        raise InputError("binary_cross_entropy takes probabilities in [0, 1]; use binary_cross_entropy_with_logits")
    rest = 1.0 - x
    floor = _like(_LOG_FLOOR, x)
    items = -(y * torch.maximum(det_log(x), floor) + (1.0 - y) * torch.maximum(det_log(rest), floor))
    return items, (x - y) / torch.maximum(x * rest, _like(_DIVISOR_FLOOR, x))


LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "mse": _mse,
    "l1": _l1,
    "smooth_l1": _smooth_l1,
    "huber": _huber,
    "bce_logits": _bce_logits,
    "bce": _bce,
}


class _Items(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, kind, parameters, weight):
        items, derivative = LOSSES[kind](x, y, *parameters)
        if weight is not None:
            items, derivative = weight * items, weight * derivative
        ctx.save_for_backward(derivative)
        return canonical_nan(items)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (derivative,) = ctx.saved_tensors
        return canonical_nan(gradient * derivative), None, None, None, None


def loss_items(
    kind: str, x: Tensor, y: Tensor, *parameters: float | Tensor | None, weight: Tensor | None = None
) -> Tensor:
    """The loss of each element; differentiable once in x.

    Args:
        kind: a key of LOSSES.
        x: predictions, float32, any shape.
        y: targets, the same shape and dtype, without gradient.
        parameters: beta of smooth_l1, delta of huber, pos_weight of bce_logits.
        weight: float32 that broadcasts to x's shape, without gradient, like pos_weight; or None.

    Raises:
        InputError: shapes or dtypes that differ, or a target or weight with a gradient.
    """
    if x.dtype != torch.float32 or y.dtype != torch.float32:
        raise InputError(f"the {kind} loss takes float32 predictions and targets, got {x.dtype} and {y.dtype}")
    if x.shape != y.shape:
        raise InputError(
            f"the {kind} loss takes targets of the predictions' shape {tuple(x.shape)}, got {tuple(y.shape)}: a "
            f"broadcast would count items twice. Reshape the targets"
        )
    if y.requires_grad:
        raise InputError(f"the targets of the {kind} loss require a gradient; detach them")
    for name, tensor in [("weight", weight), *(("pos_weight", value) for value in parameters)]:
        if isinstance(tensor, Tensor):
            _check_weight(kind, name, tensor, x)
    return _Items.apply(x, y, kind, parameters, weight)


def _check_weight(kind: str, name: str, weight: Tensor, x: Tensor) -> None:
    if weight.dtype is not torch.float32 or weight.requires_grad or not _broadcasts(weight.shape, x.shape):
        what = f"{weight.dtype} {list(weight.shape)}" + (" with a gradient" if weight.requires_grad else "")
        raise InputError(
            f"the {kind} loss takes a {name} of float32 without gradient that broadcasts to the predictions' shape "
            f"{list(x.shape)}, got {what}"
        )


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))


def _like(value: float, tensor: Tensor) -> Tensor:
    return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)  # CUDA divides by a tensor of its own only
