"""Functions of one variable: out = round(f(x)), element by element, one rounding straight to the output's format.

Gradient: round(g * d), d = f'(x) as the nearest float32, one rounding of the product to the format of x. f' is defined and
proved like f (`arithmetic.elementary`); what kernels are proved or tested on stands in `tests/ops/test_elementary.py`.

Of all functions: x is float32, bfloat16 or float16, of any shape and strides; `dtype` None means that of x. NaNs are
canonical, subnormal arguments and results are kept. Another dtype or device raises InputError.
"""

import torch

from ..arithmetic.elementary import DERIVATIVES
from ..kernels.dispatch import check_tensor, kernels_of
from .digits import output_form
from .registration import is_traced


def _apply(name: str, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if is_traced(x):
        return torch.ops.det_lightning.elementary(name, x, x.dtype if dtype is None else dtype)
    return compute(name, x, dtype)


def det_exp(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """e^x. exp(-inf) = +0, exp(inf) = inf."""
    return _apply("exp", x, dtype)


def det_expm1(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """e^x - 1. expm1(±0) = ±0, expm1(-inf) = -1."""
    return _apply("expm1", x, dtype)


def det_gelu(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x Phi(x), Phi the normal distribution function. gelu(±0) = ±0, gelu(-inf) = -0, gelu(inf) = inf: its limits."""
    return _apply("gelu", x, dtype)


def det_log(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """ln x. log(±0) = -inf, log(inf) = inf, log(1) = +0; NaN below zero."""
    return _apply("log", x, dtype)


def det_log1p(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """ln(1 + x). log1p(±0) = ±0, log1p(-1) = -inf; NaN below -1."""
    return _apply("log1p", x, dtype)


def det_reciprocal(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """1 / x. Of ±0 it is ±inf, of ±inf ±0."""
    return _apply("reciprocal", x, dtype)


def det_rsqrt(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """1 / sqrt(x). rsqrt(±0) = ±inf (as in IEEE 754), rsqrt(inf) = +0; NaN below zero."""
    return _apply("rsqrt", x, dtype)


def det_sigmoid(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """1 / (1 + e^-x). sigmoid(-inf) = +0, sigmoid(inf) = 1."""
    return _apply("sigmoid", x, dtype)


def det_silu(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x / (1 + e^-x). silu(±0) = ±0, silu(-inf) = -0, silu(inf) = inf: its limits."""
    return _apply("silu", x, dtype)


def det_softplus(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """ln(1 + e^x). softplus(-inf) = +0, softplus(inf) = inf."""
    return _apply("softplus", x, dtype)


def det_sqrt(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The square root. sqrt(±0) = ±0; NaN below zero."""
    return _apply("sqrt", x, dtype)


def det_tanh(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(e^x - e^-x) / (e^x + e^-x). tanh(±0) = ±0, tanh(±inf) = ±1."""
    return _apply("tanh", x, dtype)


def compute(name: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The function `name` of `arithmetic.elementary.FUNCTIONS` on a plain tensor, unseen by autograd."""
    check_tensor(f"det_{name}", "x", x)
    form = output_form(f"det_{name}", x.dtype if dtype is None else dtype)
    return kernels_of("elementary").elementwise(name, x, form)


def compute_gradient(name: str, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """round(gradient * f'(x)) of the function `name`, in the dtype of x; unseen by autograd."""
    check_tensor(f"det_{name}", "gradient", gradient)
    form = output_form(f"det_{name}", x.dtype)
    return kernels_of("elementary").gradient(DERIVATIVES[name], gradient, x, form)
