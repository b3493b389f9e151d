"""Where a batch-free tensor meets samples: the gradient there is the exact sum over all samples of the global batch.

A parameter, or one whose elements were only moved, receives the digits themselves. Another function of parameters has a sum
of its own, which is finished with those of the parameters, and then the function goes backward once (`GradientSink.admit`).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from det_lightning.layers.batch_free import BatchFree
from det_lightning.layers.batch_free_functions import ARITHMETIC, in_place
from det_lightning.layers.parameter_moves import Moved, whole
from det_lightning.ops import broadcast
from det_lightning.ops.digits import zero_digits
from det_lightning.ops.gemm import add_gemm_digits

_EXPANSIONS = frozenset("expand expand_as broadcast_to repeat".split())
_PER_SAMPLE = (
    "A parameter is the same for all samples, but by these shapes it is not spread over the samples in dimension 0 of the "
    "other operand: bring them there (movedim), and give the parameter the shape of one sample. If the other operand holds "
    "no samples, make it a buffer of the module (register_buffer)."
)


class GradientSink(Protocol):
    """Receives the digits of gradients, and hears in the forward pass which ones will come."""

    def expect(self, parameter: Tensor) -> None:
        """One more use of the parameter, whose gradient a backward pass may bring."""

    def digits(self, parameter: Tensor) -> Tensor | None:
        """int64 [*parameter.shape, NB] to add into, or None: this micro-batch has weight zero."""

    def added(self, parameter: Tensor) -> None:
        """What `digits` handed out last has been added to."""

    def add_product(self, parameter: Tensor, x: Tensor, w: Tensor) -> None:
        """Adds x @ w.T, of the parameter's shape, to its gradient."""

    def admit(self, number: int, tensor: Tensor, made_of: tuple[str, ...]) -> Tensor:
        """What stands for the number-th function of parameters of this micro-batch that meets samples, in `digits`."""


class Place:
    """Where the digits of one batch-free tensor's gradient go, at one use of it; a `DigitPlace` of the operation.

    Attributes:
        leaf: the tensor to compute with. Its gradient ends here.
    """

    def __init__(self, sink: GradientSink, moved: Moved, leaf: Tensor):
        self._sink, self._moved, self.leaf = sink, moved, leaf
        self._apart: Tensor | None = None
        for parameter in moved.parameters:
            sink.expect(parameter)

    def digits(self) -> Tensor | None:
        if self._moved.view is None:
            self._apart = zero_digits(self.leaf.shape, device=self.leaf.device)
            return self._apart
        digits = self._sink.digits(self._moved.parameters[0])
        return None if digits is None else self._moved.view_of(digits)

    def added(self) -> None:
        apart, self._apart = self._apart, None
        for parameter in self._moved.parameters:
            if apart is not None and (digits := self._sink.digits(parameter)) is not None:
                self._moved.add(parameter, digits, apart)
            self._sink.added(parameter)

    def add_product(self, x: Tensor, w: Tensor) -> None:
        """Adds x @ w.T, of the shape of `leaf`, to the gradient."""
        if self._moved.is_whole:
            self._sink.add_product(self._moved.parameters[0], x, w)
        elif self._moved.is_transposed:
            self._sink.add_product(self._moved.parameters[0], w, x)
        elif (digits := self.digits()) is not None:
            add_gemm_digits(digits, x, w)
            self.added()


class Meetings:
    """The calls in which batch-free tensors meet samples.

    Args:
        batch_free: knows those tensors.
        sink: receives the digits; without it gradients are rounded sums that autograd carries on.
        samples: of the micro-batch.
        name_of: parameter -> its name in the model.
        refusal: makes the error.
    """

    def __init__(
        self,
        batch_free: BatchFree,
        sink: GradientSink | None,
        samples: int,
        name_of: Callable[[Tensor], str],
        refusal: Callable[..., Exception],
    ):
        self._batch_free, self._sink, self._samples = batch_free, sink, samples
        self._name_of, self._refusal = name_of, refusal
        self._numbers: dict[tuple[Any, int], int] = {}  # of the functions of parameters, in the order of their meetings

    def place(self, tensor: Tensor) -> Place | None:
        """The place for one use of a batch-free tensor; None if no gradient is to be collected."""
        if self._sink is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        moved = self._batch_free.moved(tensor)
        if tensor.grad_fn is None:
            return Place(self._sink, moved, tensor)
        if moved is None:
            number = self._numbers.setdefault((tensor.grad_fn, tensor.output_nr), len(self._numbers))
            names = tuple(map(self._name_of, self._batch_free.parameters_below(tensor)))
            moved = whole(self._sink.admit(number, tensor, names))
        return Place(self._sink, moved, tensor.detach().requires_grad_())

    def arithmetic(self, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
        """A sum, difference, product or quotient of a batch-free tensor and samples; None if the call is another.

        Raises:
            UncoveredError: shapes by which the tensor is not the same for all samples.
        """
        args = (*args, *(kwargs[key] for key in ("input", "other") if key in kwargs))
        if name not in ARITHMETIC or len(args) != 2 or not all(isinstance(value, Tensor) for value in args):
            return None
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
            return None
        free = [value.requires_grad and self._batch_free(value) for value in args]
        if in_place(func) and (free[0] or not any(free)):
            return None
        if not any(free) and not self._is_spread_by_a_constant(args):
            return None
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        for side in (0, 1):
            if free[side]:
                self._check(name, args[side], args[1 - side], shape)
        target = args[0]
        if in_place(func):
            args = (target.clone(), args[1])  # the backward pass needs what is overwritten
        pairs = [(value, self.place(value) if one else None) for value, one in zip(args, free, strict=True)]
        first, second = reversed(pairs) if name == "rsub" else pairs
        operands = [value if place is None else place.leaf for value, place in (first, second)]
        result = broadcast.arithmetic(ARITHMETIC[name], *operands, places=(first[1], second[1]))
        return target.copy_(result) if in_place(func) else result

    def expansion(self, name: str, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
        """A batch-free tensor spread to all samples, as a class token is; None if the call is another."""
        if name not in _EXPANSIONS or not args or not (args[0].requires_grad and self._batch_free(args[0])):
            return None
        tensor = args[0]
        shape = func(tensor.detach(), *args[1:], **kwargs).shape
        asked = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        asked = shape if not asked or isinstance(asked[0], Tensor) else asked
        before = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
        copied_whole = name == "repeat" and any(a not in (1, b) for a, b in zip(before, shape, strict=True))
        # A size of 1 that is asked for is the samples' where the micro-batch has one.
        over_samples = any(
            a == 1 and b == self._samples and size != -1 for a, b, size in zip(before, shape, asked, strict=True)
        )
        if copied_whole or not over_samples:
            names = ", ".join(map(self._name_of, self._batch_free.parameters_below(tensor)))
            raise self._refusal(
                f"{name} of the parameter {names} from {list(tensor.shape)} to {list(shape)}",
                f"Covered: to the {self._samples} samples, as parameter.expand(len(x), ...). Elsewhere + - * / spread a "
                f"parameter by themselves; unsqueeze adds dimensions of size 1.",
            )
        place = self.place(tensor)
        return broadcast.expand(tensor if place is None else place.leaf, shape, place=place)

    def _is_spread_by_a_constant(self, args: tuple) -> bool:
        """Whether samples are spread by a constant: by a parameter that is frozen now, as they were while it was trained."""
        for value, other in (args, args[::-1]):
            if value.requires_grad and other.is_floating_point() and self._batch_free.is_constant(other):
                shape = torch.broadcast_shapes(value.shape, other.shape)
                return value.shape != shape and not self._lacking(value, shape)
        return False

    def _lacking(self, tensor: Tensor, shape: torch.Size) -> bool:
        """Whether it has not got the dimension of the samples, to which it is spread."""
        return bool(shape) and shape[0] == self._samples > 1 and (tensor.dim() < len(shape) or tensor.shape[0] == 1)

    def _check(self, name: str, tensor: Tensor, other: Tensor, shape: torch.Size) -> None:
        if self._samples == 1 or not shape:
            return
        per_sample = tensor.numel() > 1 and tensor.dim() == len(shape)
        per_sample = per_sample and (tensor.shape == shape or tensor.shape[0] == shape[0] == self._samples)
        if self._lacking(other, shape) or per_sample:
            names = ", ".join(map(self._name_of, self._batch_free.parameters_below(tensor)))
            raise self._refusal(
                f"{name} of the parameter {names} of shape {list(tensor.shape)} and a tensor of shape {list(other.shape)}",
                _PER_SAMPLE,
            )
