"""Elementary functions of one variable: out = round(f(x)), element by element, one rounding.

The kernels are our own float64 sequences; what they are proved or tested on stands in `tests/ops/test_elementary.py`.
"""

import torch

from ..kernels.dispatch import check_tensor, cpu_kernels


def det_exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, the nearest float32, ties to even; subnormal results are kept.

    x: float32, any shape and strides. exp(-inf) = +0, exp(inf) = inf, NaNs are canonical.
    Raises InputError for another dtype or device.
    """
    check_tensor("det_exp", "x", x, (torch.float32,))
    return cpu_kernels("elementary").elementwise("exp", x)


def det_log(x: torch.Tensor) -> torch.Tensor:
    """ln x, the nearest float32, ties to even.

    x: float32, any shape and strides. log(±0) = -inf, log(inf) = inf, log of a negative number or NaN is the canonical
    NaN, log(1) = +0. Raises InputError for another dtype or device.
    """
    check_tensor("det_log", "x", x, (torch.float32,))
    return cpu_kernels("elementary").elementwise("log", x)
