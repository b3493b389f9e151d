"""The operations as torch custom ops `det_lightning::*`: what torch.compile, torch.export and autograd see.

Eager calls do not pass through here, since a dispatch in Python costs more than a small product. `is_traced` says when a
call must: under a compiler, on fake tensors, or where autograd has to record it.
"""

import sys
from collections.abc import Sequence

import torch

from ..arithmetic.formats import NB
from ..errors import DetError

NAMESPACE = "det_lightning"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether a compiler or autograd has to see an operation on these tensors."""
    if torch.compiler.is_compiling():
        return True
    recording = torch.is_grad_enabled()
    for t in tensors:  # noqa: SIM110 - a generator would take longer than the questions
        if isinstance(t, torch.Tensor) and ((recording and t.requires_grad) or type(t) not in _PLAIN):
            return True
    return False


def _refuse_a_second_copy() -> None:
    if not hasattr(getattr(torch.ops, NAMESPACE), "gemm"):
        return
    others = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name.endswith("ops.registration") and getattr(module, "__file__", None) not in (None, __file__)
    }
    raise DetError(
        f"the custom ops {NAMESPACE}::* are registered already, by {', '.join(sorted(others)) or 'another copy'}, and now "
        f"{__file__} is imported: two copies of det_lightning are on sys.path, such as a source tree and an installed "
        f"wheel. Import one of them only: uninstall the package, or run outside the source tree"
    )


_refuse_a_second_copy()


def _register(name: str, mutates: Sequence[str] = ()):
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=tuple(mutates))


@_register("gemm")
def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
    engine: str,
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    from .gemm import compute_gemm

    return compute_gemm(x, w, bias, dtype, engine, scratch_bytes)


@gemm.register_fake
def _(x, w, bias, dtype, engine, scratch_bytes=None):
    from .gemm import check_operands

    check_operands("det_gemm", x, w, engine)
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32 if dtype is None else dtype)


def _keep_product(ctx, inputs, output):
    x, w, bias = inputs[:3]
    ctx.save_for_backward(x, w)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _product_gradients(ctx, upstream):
    """gx = RN(g w), gw = RN(g^T x), gb = RN(sum_i g[i]), each in the dtype of its argument."""
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    ops = torch.ops.det_lightning
    grad_x = ops.gemm(upstream, w.t(), None, x.dtype, "auto") if needs_x else None
    grad_w = ops.gemm(upstream.t(), x.t(), None, w.dtype, "auto") if needs_w else None
    grad_bias = ops.sum(upstream, [0], False, ctx.bias_dtype) if needs_bias else None
    return grad_x, grad_w, grad_bias


gemm.register_autograd(lambda ctx, g: (*_product_gradients(ctx, g), None, None, None), setup_context=_keep_product)


@_register("linear")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from .gemm import compute_gemm

    return compute_gemm(x, weight, bias, x.dtype, "auto")


@linear.register_fake
def _(x, weight, bias):
    return x.new_empty((x.shape[0], weight.shape[0]))


linear.register_autograd(_product_gradients, setup_context=_keep_product)


@_register("gemm_partial")
def gemm_partial(x: torch.Tensor, w: torch.Tensor, engine: str) -> torch.Tensor:
    from .gemm import compute_gemm_partial

    return compute_gemm_partial(x.detach(), w.detach(), engine)


@gemm_partial.register_fake
def _(x, w, engine):
    return x.new_empty((x.shape[0], w.shape[0], NB), dtype=torch.int64)


@_register("add_gemm_digits", mutates=["digits"])
def add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    from .gemm import compute_add_gemm_digits

    compute_add_gemm_digits(digits, x.detach(), w.detach(), engine)


@_register("sum")
def sum(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    from .reduction import compute_sum

    return compute_sum(x, None if dim is None else list(dim), keepdim, dtype)


@sum.register_fake
def _(x, dim, keepdim, dtype):
    return x.new_empty(_reduced_shape(x, dim, keepdim), dtype=x.dtype if dtype is None else dtype)


def _reduced_shape(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool) -> list[int]:
    from .reduction import reduced_dims

    reduced = reduced_dims("det_sum", x, None if dim is None else list(dim))
    kept = [1 if d in reduced else size for d, size in enumerate(x.shape)]
    return kept if keepdim else [size for d, size in enumerate(x.shape) if d not in reduced]


def _keep_sum(ctx, inputs, output):
    x, dim = inputs[:2]
    ctx.shape, ctx.dtype, ctx.kept = x.shape, x.dtype, _reduced_shape(x, dim, True)


sum.register_autograd(
    lambda ctx, g: (g.reshape(ctx.kept).expand(ctx.shape).to(ctx.dtype), None, None, None), setup_context=_keep_sum
)


@_register("sum_partial")
def sum_partial(x: torch.Tensor, dim: Sequence[int] | None) -> torch.Tensor:
    from .reduction import compute_sum_partial

    return compute_sum_partial(x.detach(), None if dim is None else list(dim))


@sum_partial.register_fake
def _(x, dim):
    return x.new_empty([*_reduced_shape(x, dim, False), NB], dtype=torch.int64)


@_register("add_sum_digits", mutates=["digits"])
def add_sum_digits(digits: torch.Tensor, x: torch.Tensor, dim: Sequence[int] | None) -> None:
    from .reduction import compute_add_sum_digits

    compute_add_sum_digits(digits, x.detach(), None if dim is None else list(dim))


@_register("finalize")
def finalize(acc: torch.Tensor, dtype: torch.dtype, denominator: int) -> torch.Tensor:
    from .digits import compute_finalize

    return compute_finalize(acc, dtype, denominator)


@finalize.register_fake
def _(acc, dtype, denominator):
    return acc.new_empty(acc.shape[:-1], dtype=dtype)


@_register("elementary")
def elementary(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from .elementary import compute

    return compute(name, x, dtype)


@elementary.register_fake
def _(name, x, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@_register("elementary_gradient")
def elementary_gradient(name: str, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from .elementary import compute_gradient

    return compute_gradient(name, gradient, x)


@elementary_gradient.register_fake
def _(name, gradient, x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_argument(ctx, inputs, output):
    ctx.function = inputs[0]
    ctx.save_for_backward(inputs[1])


elementary.register_autograd(
    lambda ctx, g: (None, torch.ops.det_lightning.elementary_gradient(ctx.function, g, ctx.saved_tensors[0]), None),
    setup_context=_keep_argument,
)
