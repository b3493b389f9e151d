"""Products with the shapes of `torch.matmul`: out[..., i, j] = round(sum over k of a[..., i, k] * b[..., k, j])."""

import torch

from ..errors import InputError
from ..kernels.dispatch import check_tensor
from .digits import output_form
from .gemm import det_gemm


def det_matmul(
    a: torch.Tensor, b: torch.Tensor, *, dtype: torch.dtype | None = None, engine: str = "auto"
) -> torch.Tensor:
    """The correctly rounded `torch.matmul(a, b)`; each element is one exact sum.

    a: [..., M, K] or [K], b: [..., K, N] or [K]; leading dimensions broadcast; float32, bfloat16 or float16, any
    strides and sizes. Returns `dtype` (None: float32). `engine` as for `det_gemm`. Raises InputError for other dtypes,
    devices or shapes.
    """
    check_tensor("det_matmul", "a", a)
    check_tensor("det_matmul", "b", b)
    dtype = torch.float32 if dtype is None else dtype
    output_form("det_matmul", dtype)
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    if a.dim() == 0 or b.dim() == 0 or left.shape[-1] != right.shape[-2]:
        raise InputError(
            f"det_matmul: a is {list(a.shape)} and b is {list(b.shape)}; the last dimension of a must be the last but "
            f"one of b (the only one of a vector)"
        )
    out = _batched(left, right, a, b, dtype, engine)
    if a.dim() == 1:
        out = out.squeeze(-2)
    return out.squeeze(-1) if b.dim() == 1 else out


def _batched(left, right, a, b, dtype, engine) -> torch.Tensor:
    try:
        sizes = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except RuntimeError as error:
        raise InputError(
            f"det_matmul: a is {list(a.shape)} and b is {list(b.shape)}; their leading dimensions do not broadcast"
        ) from error
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if right.dim() == 2:
        # One product: the leading dimensions of `a` are more rows.
        flat = left.reshape(left.shape[:-1].numel(), terms)
        return det_gemm(flat, right.t(), dtype=dtype, engine=engine).view(*left.shape[:-1], columns)
    out = torch.empty((*sizes, rows, columns), dtype=dtype)
    lefts = left.expand(*sizes, rows, terms).reshape(sizes.numel(), rows, terms)
    rights = right.expand(*sizes, terms, columns).reshape(sizes.numel(), terms, columns)
    for target, x, y in zip(out.view(sizes.numel(), rows, columns), lefts, rights, strict=True):
        target.copy_(det_gemm(x, y.t(), dtype=dtype, engine=engine))
    return out
