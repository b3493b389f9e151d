"""Elementary functions of one variable: out = round(f(x)), element by element, one rounding.

The kernels are our own float64 sequences; what they are proved or tested on stands in `tests/ops/test_elementary.py`.
"""

import torch

from ..kernels.dispatch import check_tensor, cpu_kernels
from .registration import is_traced


def det_exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, the nearest float32, ties to even; subnormal results are kept.

    x: float32, any shape and strides; differentiable: RN(g exp(x)). exp(-inf) = +0, exp(inf) = inf, NaNs are canonical.
    Raises InputError for another dtype or device.
    """
    return torch.ops.det_lightning.exp(x) if is_traced(x) else compute("exp", x)


def det_log(x: torch.Tensor) -> torch.Tensor:
    """ln x, the nearest float32, ties to even.

    x: float32, any shape and strides; differentiable: RN(g RN(1 / x)). log(±0) = -inf, log(inf) = inf, log(1) = +0, log
    of a negative number or NaN is the canonical NaN. Raises InputError for another dtype or device.
    """
    return torch.ops.det_lightning.log(x) if is_traced(x) else compute("log", x)


def compute(name: str, x: torch.Tensor) -> torch.Tensor:
    """`det_<name>` on a plain tensor, unseen by autograd."""
    check_tensor(f"det_{name}", "x", x, (torch.float32,))
    return cpu_kernels("elementary").elementwise(name, x)
