"""Exact sums by index: out[i] = round(x[i] + sum of source[k] over all k with index[k] = i), one rounding.

Nothing depends on the order of the indices or on how often one comes.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..arithmetic.formats import NB
from ..errors import InputError
from ..kernels.dispatch import check_tensor, kernels_of
from .digits import check_states, output_form


def _check_index(operation: str, index: object, size: int) -> torch.Tensor:
    """The index as contiguous int64; raises InputError for another dtype or a place outside [0, size)."""
    check_tensor(operation, "index", index, (torch.int64, torch.int32))
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise InputError(
            f"{operation}: index goes from {int(index.min())} to {int(index.max())}; it must stay in [0, {size})"
        )
    return index.to(torch.int64).contiguous()


def _dimension(operation: str, x: torch.Tensor, dim: int) -> int:
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InputError(f"{operation}: dim is {dim!r}; x is {list(x.shape)}, so it must be in [{-x.dim()}, {x.dim()})")
    return dim % x.dim()


def add_index_digits(digits: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """digits[index[k]] += source[k] for every k, exactly and in place.

    digits: int64 [N, *sizes, NB], any state and strides; index: int64 or int32 [n], in [0, N); source: [n, *sizes],
    float32, bfloat16 or float16. Raises InputError for arguments that do not fit.
    """
    check_states("add_index_digits", "digits", digits)
    check_tensor("add_index_digits", "source", source)
    if digits.dim() < 2 or index.dim() != 1 or (*index.shape, *digits.shape[1:-1]) != source.shape:
        raise InputError(
            f"add_index_digits: digits is {list(digits.shape)}, index {list(index.shape)}, source {list(source.shape)}; "
            f"they must be [N, *sizes, {NB}], [n] and [n, *sizes]"
        )
    index = _check_index("add_index_digits", index, digits.shape[0])
    target = digits.contiguous()
    columns = digits.shape[1:-1].numel()
    kernels_of("scatter").add_index_digits(
        target.view(digits.shape[0], columns, NB), index, source.reshape(index.numel(), columns)
    )
    if target is not digits:
        digits.copy_(target)


def det_index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`torch.index_add` with each element one exact sum of x and all its terms, rounded once to `dtype` (None: x's).

    x: [*, N, *], index: int64 or int32 [n] in [0, N), source: like x with n in place of N; float32, bfloat16 or
    float16, any strides. Returns a new tensor of x's shape. Raises InputError for arguments that do not fit.
    """
    check_tensor("det_index_add", "x", x)
    check_tensor("det_index_add", "source", source)
    form = output_form("det_index_add", x.dtype if dtype is None else dtype)
    dim = _dimension("det_index_add", x, dim)
    expected = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    if index.dim() != 1 or source.shape != expected:
        raise InputError(
            f"det_index_add: index is {list(index.shape)} and source {list(source.shape)}; for x {list(x.shape)} and "
            f"dim {dim} they must be [n] and x's shape with n at dim {dim}"
        )
    index = _check_index("det_index_add", index, x.shape[dim])
    rows, terms = x.movedim(dim, 0), source.movedim(dim, 0)
    columns = rows.shape[1:].numel()
    out = kernels_of("scatter").index_sum(
        rows.reshape(rows.shape[0], columns), index, terms.reshape(terms.shape[0], columns), rows.shape[0], form
    )
    return out.view(rows.shape).movedim(0, dim)


def det_scatter_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`torch.scatter_add` with each element one exact sum of x and all its terms, rounded once to `dtype` (None: x's).

    index: int64 or int32, of as many dimensions as x and source and no larger than either but along `dim`; its values
    are places along `dim`. Returns a new tensor of x's shape. Raises InputError for arguments that do not fit.
    """
    check_tensor("det_scatter_add", "x", x)
    check_tensor("det_scatter_add", "source", source)
    form = output_form("det_scatter_add", x.dtype if dtype is None else dtype)
    dim = _dimension("det_scatter_add", x, dim)
    fits = index.dim() == x.dim() == source.dim() and all(
        n <= s and (d == dim or n <= m)
        for d, (n, s, m) in enumerate(zip(index.shape, source.shape, x.shape, strict=True))
    )
    if not fits:
        raise InputError(
            f"det_scatter_add: index is {list(index.shape)}, source {list(source.shape)}, x {list(x.shape)}; index must "
            f"have their number of dimensions and be no larger than source, nor than x but along dim {dim}"
        )
    index = _check_index("det_scatter_add", index, x.shape[dim])
    source = source[tuple(slice(0, n) for n in index.shape)]
    # The place in x of every term, row-major.
    places, step = torch.zeros((), dtype=torch.int64, device=index.device), 1
    for d in range(x.dim() - 1, -1, -1):
        own = torch.arange(index.shape[d], device=index.device).view([-1 if e == d else 1 for e in range(x.dim())])
        along = index if d == dim else own
        places = places + along * step
        step *= x.shape[d]
    out = kernels_of("scatter").index_sum(
        x.reshape(-1, 1), places.reshape(-1).contiguous(), source.reshape(-1, 1), x.numel(), form
    )
    return out.view(x.shape)


def embedding_gradient(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    *,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient [rows, D] of an embedding's weight: row i = RN(sum of gradient[k] over all k with indices[k] = i).

    gradient: [*indices.shape, D]; a row `padding_idx` gets zeros. `dtype` None: that of `gradient`.
    """
    index, source = _embedding_terms("embedding_gradient", gradient, indices, rows, padding_idx)
    form = output_form("embedding_gradient", gradient.dtype if dtype is None else dtype)
    return kernels_of("scatter").index_sum(None, index, source, rows, form)


def add_embedding_digits(
    digits: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, *, padding_idx: int | None = None
) -> None:
    """digits [rows, D, NB] += the exact gradient of an embedding's weight, in place."""
    check_states("add_embedding_digits", "digits", digits)
    index, source = _embedding_terms("add_embedding_digits", gradient, indices, digits.shape[0], padding_idx)
    add_index_digits(digits, index, source)


def _embedding_terms(operation, gradient, indices, rows, padding_idx):
    check_tensor(operation, "gradient", gradient)
    if gradient.shape[:-1] != indices.shape or gradient.dim() == 0:
        raise InputError(
            f"{operation}: gradient is {list(gradient.shape)} and indices {list(indices.shape)}; gradient must be "
            f"[*indices.shape, D]"
        )
    index = _check_index(operation, indices, rows).view(-1)
    source = gradient.reshape(index.numel(), gradient.shape[-1])
    if padding_idx is not None:
        kept = index != padding_idx % rows
        index, source = index[kept], source[kept]
    return index, source


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, indices, weight, padding_idx, sink):
        ctx.save_for_backward(indices, weight)
        ctx.padding_idx, ctx.sink = padding_idx, sink
        return weight[indices]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        indices, weight = ctx.saved_tensors
        if ctx.sink is None:
            rows, dtype = weight.shape[0], weight.dtype
            gradient = embedding_gradient(upstream, indices, rows, padding_idx=ctx.padding_idx, dtype=dtype)
            return None, gradient, None, None
        if (digits := ctx.sink.digits(weight)) is not None:
            add_embedding_digits(digits, upstream, indices, padding_idx=ctx.padding_idx)
        return None, None, None, None


def embedding(
    indices: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None, sink=None
) -> torch.Tensor:
    """weight[indices]; the gradient of the weight is one exact sum a row, rounded once, or digits in `sink`.

    indices: int64 or int32 of any shape, in [0, rows); weight: [rows, D]. `sink` as for `ops.linear.linear`.
    """
    if has_torch_function((indices, weight)):
        return handle_torch_function(embedding, (indices, weight), indices, weight, padding_idx=padding_idx, sink=sink)
    check_tensor("embedding", "weight", weight)
    if weight.dim() != 2:
        raise InputError(f"embedding: weight is {list(weight.shape)}; it must be [rows, D]")
    index = _check_index("embedding", indices, weight.shape[0])
    return _Embedding.apply(index, weight, padding_idx, sink)
