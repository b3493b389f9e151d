"""Products with the shapes of `torch.matmul`: out[..., i, j] = round(sum over k of a[..., i, k] * b[..., k, j])."""

import torch
from torch.autograd.function import once_differentiable

from ..arithmetic.formats import NB
from ..errors import InputError
from ..kernels.dispatch import FLOAT_DTYPES, check_tensor, kernels_of
from .digits import output_form, zero_digits
from .gemm import ENGINES, compute_gemm, det_gemm, det_gemm_partial
from .registration import is_traced

_GEMM = kernels_of("gemm")


def det_matmul(
    a: torch.Tensor, b: torch.Tensor, *, dtype: torch.dtype | None = None, engine: str = "auto"
) -> torch.Tensor:
    """The correctly rounded `torch.matmul(a, b)`; each element is one exact sum.

    a: [..., M, K] or [K], b: [..., K, N] or [K]; leading dimensions broadcast; float32, bfloat16 or float16, any
    strides and sizes. Returns `dtype` (None: float32). `engine` as for `det_gemm`. Raises InputError for other dtypes,
    devices or shapes.
    """
    dtype = torch.float32 if dtype is None else dtype
    form = output_form("det_matmul", dtype)
    if engine in ENGINES and _are_plain_matrices(a, b):
        return _GEMM.gemm(a, b.t(), None, form, engine)
    left, right = _as_matrices("det_matmul", a, b)
    out = _batched(left, right, a, b, dtype, engine)
    if a.dim() == 1:
        out = out.squeeze(-2)
    return out.squeeze(-1) if b.dim() == 1 else out


def det_matmul_partial(a: torch.Tensor, b: torch.Tensor, *, engine: str = "auto") -> torch.Tensor:
    """The exact `torch.matmul(a, b)` as canonical digits: int64 [..., M, N, NB] without the dimensions that vectors lack.

    Shards of K add up: `det_finalize(det_combine([...]))` of their digits is `det_matmul` of the whole. Arguments and
    errors as for `det_matmul`.
    """
    left, right = _as_matrices("det_matmul_partial", a, b)
    sizes = _leading_sizes("det_matmul_partial", left, right, a, b)
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    lefts = left.expand(*sizes, rows, terms).reshape(sizes.numel(), rows, terms)
    rights = right.expand(*sizes, terms, columns).reshape(sizes.numel(), terms, columns)
    parts = [det_gemm_partial(x, y.t(), engine=engine) for x, y in zip(lefts, rights, strict=True)]
    digits = torch.stack(parts) if parts else zero_digits((0, rows, columns), device=a.device)
    digits = digits.view(*sizes, rows, columns, NB)
    if a.dim() == 1:
        digits = digits.squeeze(-3)
    return digits.squeeze(-2) if b.dim() == 1 else digits


def _are_plain_matrices(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nothing is left to check or to record: small products would wait for more questions than these."""
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and len(of_a := a.shape) == 2 == len(of_b := b.shape)
        and of_a[1] == of_b[0]
        and a.dtype in FLOAT_DTYPES
        and b.dtype in FLOAT_DTYPES
        and (a.is_cuda or a.is_cpu)  # and b, or the dispatcher refuses it
        and a.layout is b.layout is torch.strided
        and not is_traced(a, b)
    )


def _as_matrices(operation: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., M, K] and [..., K, N]: a vector is one row or one column."""
    check_tensor(operation, "a", a)
    check_tensor(operation, "b", b)
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    if a.dim() == 0 or b.dim() == 0 or left.shape[-1] != right.shape[-2]:
        raise InputError(
            f"{operation}: a is {list(a.shape)} and b is {list(b.shape)}; the last dimension of a must be the last but "
            f"one of b (the only one of a vector)"
        )
    return left, right


def _leading_sizes(operation: str, left, right, a, b) -> torch.Size:
    try:
        return torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except RuntimeError as error:
        raise InputError(
            f"{operation}: a is {list(a.shape)} and b is {list(b.shape)}; their leading dimensions do not broadcast"
        ) from error


def _batched(left, right, a, b, dtype, engine) -> torch.Tensor:
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == right.dim() == 2:
        return det_gemm(left, right.t(), dtype=dtype, engine=engine)
    if right.dim() == 2:
        # One product: the leading dimensions of `a` are more rows.
        flat = left.reshape(left.shape[:-1].numel(), terms)
        return det_gemm(flat, right.t(), dtype=dtype, engine=engine).view(*left.shape[:-1], columns)
    sizes = left.shape[:-2]
    if sizes != right.shape[:-2]:
        sizes = _leading_sizes("det_matmul", left, right, a, b)
    lefts = left.expand(*sizes, rows, terms).reshape(sizes.numel(), rows, terms)
    rights = right.expand(*sizes, terms, columns).reshape(sizes.numel(), terms, columns)
    return _products(lefts, rights.transpose(1, 2), dtype, engine).view(*sizes, rows, columns)


def _products(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, engine: str) -> torch.Tensor:
    """The products x[b] @ w[b].T of a batch: x [B, M, K], w [B, N, K]."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or type(w) is not torch.Tensor:
        # One by one, through the operation that compilers know.
        products = [det_gemm(one, other, dtype=dtype, engine=engine) for one, other in zip(x, w, strict=True)]
        return torch.stack(products) if products else x.new_empty((0, x.shape[1], w.shape[1]), dtype=dtype)
    if is_traced(x, w):
        return _Products.apply(x, w, dtype, engine)
    return _compute_products(x, w, dtype, engine)


def _compute_products(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, engine: str) -> torch.Tensor:
    """`_products` on plain tensors: on CUDA in one call."""
    if engine not in ENGINES:
        raise InputError(f"det_matmul: engine is {engine!r}; allowed: {', '.join(ENGINES)}; all give the same bits")
    if x.is_cuda and w.is_cuda:
        return _GEMM.gemm(x, w, None, output_form("det_matmul", dtype), engine)
    out = torch.empty((x.shape[0], x.shape[1], w.shape[1]), dtype=dtype, device=x.device)
    for target, one, other in zip(out, x, w, strict=True):
        target.copy_(compute_gemm(one, other, None, dtype, engine))
    return out


class _Products(torch.autograd.Function):
    """gx = RN(g w), gw = RN(g^T x), each in the dtype of its argument, as for one product."""

    @staticmethod
    def forward(ctx, x, w, dtype, engine):
        ctx.save_for_backward(x, w)
        return _compute_products(x, w, dtype, engine)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        grad_x = _compute_products(upstream, w.transpose(1, 2), x.dtype, "auto") if needs_x else None
        grad_w = _compute_products(upstream.transpose(1, 2), x.transpose(1, 2), w.dtype, "auto") if needs_w else None
        return grad_x, grad_w, None, None
