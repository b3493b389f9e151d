"""Exact matrix products: out[i, j] = round(sum over k of x[i, k] * w[j, k] + bias[j]), one rounding.

The sum is over real numbers, so tiling, threads, the split of K and the engine cannot change a bit.
"""

import torch

from ..arithmetic.formats import NB
from ..errors import InputError
from ..kernels.dispatch import check_tensor, kernels_of
from .digits import check_states, output_form, zero_digits
from .registration import is_traced

ENGINES = ("auto", "int8", "float64", "long_accumulator")


def check_operands(operation: str, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    """Raise InputError unless x is [M, K] and w [N, K] of dtypes and on a device that are covered, and the engine known."""
    check_tensor(operation, "x", x)
    check_tensor(operation, "w", w)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise InputError(
            f"{operation}: x is {list(x.shape)} and w is {list(w.shape)}; they must be [M, K] and [N, K] with the same "
            f"K, and the result is x @ w.T"
        )
    if engine not in ENGINES:
        raise InputError(f"{operation}: engine is {engine!r}; allowed: {', '.join(ENGINES)}; all give the same bits")


def det_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    engine: str = "auto",
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    """The correctly rounded product x @ w.T + bias.

    x: [M, K], w: [N, K], bias: [N] or None; float32, bfloat16 or float16, any strides, any sizes (0 included).
    Returns [M, N] of `dtype` (None: float32). The bias is one more term of the exact sum. Subnormals are kept, an
    exact zero is +0, NaNs are canonical. `engine` ("auto", "int8", "float64", "long_accumulator") changes only the time;
    `scratch_bytes` bounds the extra memory (None: 256 MiB on a CPU, 1 GiB on a GPU; the smallest tile is always taken).
    Differentiable: gx = RN(g w), gw = RN(g^T x), gb = RN(sum of g over its rows). Raises InputError for another dtype,
    device or shape.
    """
    if is_traced(x, w, bias):
        return torch.ops.det_lightning.gemm(x, w, bias, dtype, engine, scratch_bytes)
    return compute_gemm(x, w, bias, dtype, engine, scratch_bytes)


def compute_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
    engine: str,
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    """`det_gemm` on plain tensors, unseen by autograd."""
    check_operands("det_gemm", x, w, engine)
    if bias is not None:
        check_tensor("det_gemm", "bias", bias)
        if bias.shape != w.shape[:1]:
            raise InputError(
                f"det_gemm: bias is {list(bias.shape)} and w is {list(w.shape)}; bias must be [N] with N = {w.shape[0]}"
            )
    form = output_form("det_gemm", torch.float32 if dtype is None else dtype)
    bound = {} if scratch_bytes is None else {"scratch_bytes" if x.is_cpu else "workspace_bytes": scratch_bytes}
    return kernels_of("gemm").gemm(x, w, bias, form, engine, **bound)


def det_gemm_partial(x: torch.Tensor, w: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """The exact product as canonical digits: int64 [M, N, NB]. Arguments and errors as for `det_gemm`."""
    if is_traced(x, w):
        return torch.ops.det_lightning.gemm_partial(x, w, engine)
    return compute_gemm_partial(x, w, engine)


def compute_gemm_partial(x: torch.Tensor, w: torch.Tensor, engine: str) -> torch.Tensor:
    """`det_gemm_partial` on plain tensors."""
    check_operands("det_gemm_partial", x, w, engine)
    digits = zero_digits((x.shape[0], w.shape[0]), device=x.device)
    kernels_of("gemm").add_gemm_digits(digits, x, w, engine)
    # On the CPU they are canonical already.
    return digits if digits.is_cpu else kernels_of("reduction").normalise(digits)


def add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *, engine: str = "auto") -> None:
    """digits += x @ w.T, exactly and in place.

    digits: int64 [M, N, NB], any state and strides; each digit moves by less than 2^32. Other arguments and errors as
    for `det_gemm`.
    """
    if is_traced(x, w, digits):
        torch.ops.det_lightning.add_gemm_digits(digits, x, w, engine)
    else:
        compute_add_gemm_digits(digits, x, w, engine)


def compute_add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    """`add_gemm_digits` on plain tensors."""
    check_operands("add_gemm_digits", x, w, engine)
    check_states("add_gemm_digits", "digits", digits)
    if digits.shape != (x.shape[0], w.shape[0], NB):
        raise InputError(
            f"add_gemm_digits: digits is {list(digits.shape)}; for x {list(x.shape)} and w {list(w.shape)} it must be "
            f"{[x.shape[0], w.shape[0], NB]}"
        )
    target = digits if digits.is_contiguous() else digits.contiguous()
    kernels_of("gemm").add_gemm_digits(target, x, w, engine)
    if target is not digits:
        digits.copy_(target)
