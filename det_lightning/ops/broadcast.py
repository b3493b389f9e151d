"""+ - * / of two tensors whose shapes broadcast, and expand. Forward: one IEEE operation an element. Backward, with S(t) the
exact sum of the elements of t over the places to which an operand was spread:

    a + b    ga = S(g)           gb = S(g)
    a - b    ga = S(g)           gb = S(-g)
    a * b    ga = S(RN(g b))     gb = S(RN(g a))
    a / b    ga = S(RN(g / b))   gb = S(-RN(RN(g out) / b)), out = RN(a / b)
    expand   ga = S(g)

S is rounded once; or, with a place for digits, its digits are added there and nothing is rounded.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError
from .canonical import canonical_nan
from .reduction import add_sum_digits, det_sum

OPERATIONS = ("add", "sub", "mul", "div")


class DigitPlace(Protocol):
    """Where the exact digits of one operand's gradient are added up."""

    def digits(self) -> Tensor | None:
        """int64 [*operand.shape, NB] to add into, or None: the gradient counts for nothing."""

    def added(self) -> None:
        """What `digits` handed out has been added to."""


class _Arithmetic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, operation, first, second):
        out = canonical_nan(getattr(torch, operation)(a, b))
        kept = {"mul": (a, b), "div": (out, b)}.get(operation, ())
        ctx.save_for_backward(*kept)
        ctx.operation, ctx.shapes, ctx.places = operation, (a.shape, b.shape), (first, second)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        saved = ctx.saved_tensors  # once: activation checkpointing hands it out once
        gradients = []
        for side in (0, 1):
            needed = ctx.needs_input_grad[side]
            terms = _terms(ctx.operation, side, gradient, saved) if needed else None
            gradients.append(None if terms is None else _summed(terms, ctx.shapes[side], ctx.places[side]))
        return *gradients, None, None, None


def _terms(operation: str, side: int, gradient: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
    if operation == "mul":
        return canonical_nan(gradient * saved[1 - side])
    if operation == "div":
        out, divisor = saved
        return canonical_nan(gradient / divisor if side == 0 else -(gradient * out / divisor))
    return canonical_nan(-gradient) if operation == "sub" and side else gradient


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, shape, place):
        ctx.shape, ctx.place = a.shape, place
        return a.expand(shape).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _summed(gradient, ctx.shape, ctx.place), None, None


def _summed(terms: Tensor, shape: torch.Size, place: DigitPlace | None) -> Tensor | None:
    """S of the terms, of this shape; None if its digits went to the place."""
    extra = terms.dim() - len(shape)
    dims = [d for d in range(terms.dim()) if d < extra or (shape[d - extra] == 1 and terms.shape[d] != 1)]
    if place is None:
        return det_sum(terms, dim=dims, dtype=terms.dtype).view(shape) if dims else terms
    digits = place.digits()
    if digits is not None:
        kept = digits.view(*(size for d, size in enumerate(terms.shape) if d not in dims), digits.shape[-1])
        add_sum_digits(kept, terms, dim=dims)
        place.added()
    return None


def arithmetic(
    operation: str, a: Tensor, b: Tensor, *, places: tuple[DigitPlace | None, DigitPlace | None] = (None, None)
) -> Tensor:
    """a + b, a - b, a * b or a / b; differentiable once.

    Args:
        operation: one of OPERATIONS.
        a, b: floating-point tensors of one device whose shapes broadcast. As in torch, unlike formats are promoted; an
            operand is rounded to the format of the result first.
        places: of a and b, for the digits of their gradients, which are then not returned to autograd.

    Raises:
        InputError: shapes that do not broadcast, no floating-point numbers, or two devices.
    """
    if a.device != b.device and a.is_cpu and a.dim() == 0:
        a = a.to(b.device)  # a number, as torch takes it
    elif a.device != b.device and b.is_cpu and b.dim() == 0:
        b = b.to(a.device)
    if a.device != b.device:
        raise InputError(f"{operation} takes tensors of one device, got {a.device} and {b.device}")
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        raise InputError(f"{operation} takes floating-point tensors here, got {a.dtype} and {b.dtype}")
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError as error:
        raise InputError(f"{operation}: the shapes {list(a.shape)} and {list(b.shape)} do not broadcast") from error
    return _Arithmetic.apply(a.to(dtype), b.to(dtype), operation, *places)


def expand(a: Tensor, shape: torch.Size, *, place: DigitPlace | None = None) -> Tensor:
    """A copy of `a` spread to `shape`; differentiable once. `place` as for `arithmetic`."""
    return _Expand.apply(a, shape, place)
