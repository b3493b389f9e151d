"""The Euclidean norm of all gradients: the square root of one exact sum of squares, rounded once."""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch

from det_lightning.arithmetic.formats import FLOAT32, NB
from det_lightning.arithmetic.rounding import round_integer
from det_lightning.ops.digits import digits_value
from det_lightning.ops.reduction import sum_of_squares_partial
from det_lightning.optim.scaling import store

_SQUARE_LSB_EXPONENT = -298


def gradient_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """RN(sqrt(exact sum of the squares of all elements)), float32 without dimensions.

    The same bits for every sharding and order of the gradients; +0 without gradients.
    """
    total = torch.zeros(NB, dtype=torch.int64)
    for gradient in gradients:
        total += sum_of_squares_partial(gradient)
    value = digits_value(total)
    if not isinstance(value, Fraction):
        return torch.tensor(value, dtype=torch.float32)
    integer = int(value * Fraction(2) ** -_SQUARE_LSB_EXPONENT)
    # 2^64 more bits than needed, then a last bit that says whether anything was left over: one rounding decides.
    root = math.isqrt(integer << 128)
    sticky = 2 * root + (root * root != integer << 128)
    bits = round_integer(sticky, _SQUARE_LSB_EXPONENT // 2 - 64 - 1, FLOAT32)
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def clip_gradients_by_norm(gradients: list[torch.Tensor], limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales all gradients in place to a norm of at most `limit`.

    c = RN(limit / RN(norm + 1e-6)) in float32; if c < 1 each gradient becomes RN(g c).

    Returns:
        (norm before, coefficient: c, or 1 if nothing was scaled), float32 without dimensions.
    """
    norm = gradient_norm(gradients)
    coefficient = torch.tensor(limit, dtype=torch.float32) / (norm + torch.tensor(1e-6, dtype=torch.float32))
    if coefficient >= 1:
        return norm, torch.ones_like(norm)
    for gradient in gradients:
        store(gradient, gradient * coefficient)
    return norm, coefficient
