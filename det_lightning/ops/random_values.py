"""Random numbers at the coordinates of a sample: the same whatever the batch around it.

word(key, position, c) for an element with per-sample coordinates c = (..., c3, c2, c1), last dimension c1:
    word c1 mod 4 of philox(key, (floor(c1 / 4), c2, c3, position)), an integer w in [0, 2^32)
    uniform  (w >> 8) 2^-24, in [0, 1);   integers  low + floor(w (high - low) / 2^32)
    normal   RN32 of the inverse normal distribution at u = (w + 1/2) 2^-32 by Wichura's AS 241, in float64 operations of
             one rounding each and, in the tails, the correctly rounded float32 logarithm
    dropout  kept where w >= T = round(p 2^32):  RN(x RN(1 / (1 - p))), else +0;  backward the same on the gradient
"""

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError
from .canonical import canonical_nan
from .elementary import det_log
from .philox import philox_words

_MOST_DIMENSIONS = 3
# Wichura, "Algorithm AS 241: The percentage points of the normal distribution", 1988: PPND16. The third pair, for u
# below exp(-25), is out of reach of 32 bits.
_CENTRE = (
    [3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3],
    [1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3],
)  # fmt: skip
_TAIL = (
    [1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4],
    [1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9],
)  # fmt: skip


def sample_words(key: int, positions: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """int64 [n, *shape]: one word an element, in [0, 2^32).

    Args:
        key: of the place.
        positions: int64 [n], of the samples.
        shape: of a sample, at most three dimensions.

    Raises:
        InputError: more dimensions.
    """
    if len(shape) > _MOST_DIMENSIONS:
        raise InputError(
            f"random numbers for samples of {len(shape)} dimensions, {list(shape)}; at most {_MOST_DIMENSIONS} have "
            f"coordinates. Flatten some of them first, for example x.flatten(1, 2)"
        )
    sizes = (1,) * (_MOST_DIMENSIONS - len(shape)) + tuple(shape)
    device = positions.device
    quads = -(-sizes[2] // 4)
    counter = (
        torch.arange(quads, device=device),
        torch.arange(sizes[1], device=device).view(-1, 1),
        torch.arange(sizes[0], device=device).view(-1, 1, 1),
        positions.view(-1, 1, 1, 1),
    )
    words = torch.stack(philox_words(key, counter), dim=-1)
    return words.reshape(len(positions), *sizes[:2], quads * 4)[..., : sizes[2]].reshape(len(positions), *shape)


def uniform(words: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2^-24."""
    return (words >> 8).to(torch.float32) * 2.0**-24


def integers(words: Tensor, low: int, high: int) -> Tensor:
    """int64 in [low, high). Raises InputError unless 0 < high - low <= 2^31."""
    if not 0 < high - low <= 1 << 31:
        raise InputError(f"random integers in [{low}, {high}): the range must hold 1 to 2^31 of them")
    return low + (words * (high - low) >> 32)


def normal(words: Tensor) -> Tensor:
    """float32 of the normal distribution with mean 0 and deviation 1; magnitudes below 6.4."""
    u = (words.double() + 0.5) * 2.0**-32
    q = u - 0.5
    centre = q * _ratio(0.180625 - q * q, *_CENTRE)
    tail = torch.minimum(u, 1.0 - u)
    r = _square_root(-det_log(tail.float()).double()) - 1.6
    tail = _ratio(r, *_TAIL)
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -tail, tail)).float()


def _ratio(x: Tensor, numerator: list[float], denominator: list[float]) -> Tensor:
    """Two polynomials by Horner's rule, a multiplication and an addition a step, and their quotient."""
    values = []
    for coefficients in (numerator, denominator):
        value = torch.full_like(x, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            value = value * x
            value = value + coefficient
        values.append(value)
    return values[0] / values[1]


def _square_root(x: Tensor) -> Tensor:
    # NumPy on the CPU: torch.sqrt is not correctly rounded on every processor.
    return torch.from_numpy(np.sqrt(x.numpy())) if x.is_cpu else torch.sqrt(x)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept, scale):
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return _scaled(x, kept, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return _scaled(gradient, kept, ctx.scale), None, None


def _scaled(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    product = x.float() * torch.tensor(scale, dtype=torch.float32)
    return canonical_nan(torch.where(kept, product, 0.0).to(x.dtype))


def dropout(x: Tensor, words: Tensor, p: float) -> Tensor:
    """x with each element dropped (+0) with probability p, the others scaled by RN(1 / (1 - p)); differentiable once.

    Args:
        x: floating point, any shape.
        words: from `sample_words`; broadcasts to x's shape.
        p: in [0, 1].

    Raises:
        InputError: p outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout with p = {p}; a probability lies in [0, 1]")
    kept = (words >= round(p * 2**32)).expand(x.shape)
    return _Dropout.apply(x, kept, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
