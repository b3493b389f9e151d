"""Clipping by value, or by the Euclidean norm of all gradients: the root of one exact sum of squares, rounded once."""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

from det_lightning.arithmetic.formats import FLOAT32, NB
from det_lightning.arithmetic.rounding import round_integer
from det_lightning.errors import InputError
from det_lightning.ops.digits import digits_value
from det_lightning.ops.reduction import sum_of_squares_partial
from det_lightning.optim.scaling import store

_SQUARE_LSB_EXPONENT = -298


def gradient_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """RN(sqrt(exact sum of the squares of all elements)), float32 without dimensions.

    The same bits for every sharding and order of the gradients; +0 without gradients.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    for gradient in gradients:
        states = sum_of_squares_partial(gradient)
        totals[states.device] = totals[states.device] + states if states.device in totals else states
    device = next(iter(totals), torch.device("cpu"))
    value = digits_value(sum((total.cpu() for total in totals.values()), torch.zeros(NB, dtype=torch.int64)))
    if not isinstance(value, Fraction):
        return torch.tensor(value, dtype=torch.float32, device=device)
    integer = int(value * Fraction(2) ** -_SQUARE_LSB_EXPONENT)
    # 2^64 more bits than needed, then a last bit that says whether anything was left over: one rounding decides.
    root = math.isqrt(integer << 128)
    sticky = 2 * root + (root * root != integer << 128)
    bits = round_integer(sticky, _SQUARE_LSB_EXPONENT // 2 - 64 - 1, FLOAT32)
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32)).to(device)


def clip_gradients_by_norm(gradients: list[torch.Tensor], limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales all gradients in place to a norm of at most `limit`.

    c = RN(limit / RN(norm + 1e-6)) in float32; if c < 1 each gradient becomes RN(g c).

    Returns:
        (norm before, coefficient: c, or 1 if nothing was scaled), float32 without dimensions.
    """
    norm = gradient_norm(gradients)
    limit_here = torch.tensor(limit, dtype=torch.float32, device=norm.device)
    coefficient = limit_here / (norm + torch.tensor(1e-6, dtype=torch.float32))
    if coefficient >= 1:
        return norm, torch.ones_like(norm)
    for gradient in gradients:
        store(gradient, gradient.float() * coefficient.to(gradient.device))
    return norm, coefficient


def clip_gradients_by_value(gradients: list[torch.Tensor], limit: float) -> None:
    """Moves every element into [-RN(limit), RN(limit)] in place; a NaN stays one.

    Raises InputError for a limit that is not positive.
    """
    if not limit > 0.0:
        raise InputError(f"gradients are clipped to [-limit, limit] with a limit above 0, got {limit}")
    for gradient in gradients:
        bound = torch.tensor(limit, dtype=gradient.dtype, device=gradient.device)
        store(gradient, torch.where(gradient.abs() > bound, torch.copysign(bound, gradient), gradient))
