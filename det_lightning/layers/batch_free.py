"""Which tensors of a micro-batch are batch-free: made of parameters and constants of the model, without any sample.

They are the same in every micro-batch and on every rank. Where one first meets samples, its gradient is the exact sum over
all of them (meetings.py); what lies behind that place goes backward once a step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from det_lightning.kernels.dispatch import FLOAT_DTYPES
from det_lightning.layers.batch_free_functions import APART, STOCK_ON_CONSTANTS, function_of
from det_lightning.layers.call_names import MOVES, flat
from det_lightning.layers.loss_calls import identity
from det_lightning.layers.parameter_moves import Moved, moved_by, whole


class BatchFree:
    """Knows the batch-free tensors of one micro-batch.

    Args:
        model: its parameters and buffers are where they begin.
        samples: of the micro-batch. A constant with so many rows may as well be made for the samples, and is not taken for
            batch-free unless it is a buffer.
        elder: what was known when a region ran that activation checkpointing computes again. It is handed copies there,
            which are told by their addresses.
    """

    def __init__(self, model: nn.Module, samples: int = 1, elder: "BatchFree | None" = None):
        self._model, self._samples = model, samples
        self._made: dict[tuple[Any, int], Moved | None] = (
            {} if elder is None else elder._made
        )  # by autograd node, output
        self._addresses: set[tuple] = set() if elder is None else elder._addresses
        self._copies_count = elder is not None
        # By identity, held so that it lasts.
        self._constants: dict[int, Tensor] = {} if elder is None else elder._constants
        self._storages: set[int] | None = None

    def __call__(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which requires a gradient, is one."""
        if tensor.grad_fn is not None:
            return (tensor.grad_fn, tensor.output_nr) in self._made
        if isinstance(tensor, nn.Parameter):
            return tensor.requires_grad
        return self._copies_count and tensor.requires_grad and identity(tensor) in self._addresses

    def among(self, operands: Iterable[Tensor]) -> list[Tensor]:
        """Those that require a gradient and are batch-free."""
        return [value for value in operands if value.requires_grad and self(value)]

    def are_all(self, operands: list[Tensor]) -> bool:
        """Whether a call on these operands is a function of parameters and constants alone, with a gradient."""
        if not any(value.requires_grad and self(value) for value in operands):
            return False
        return all(self(value) if value.requires_grad else self.is_constant(value) for value in operands)

    def moved(self, tensor: Tensor) -> Moved | None:
        """The moves that make `tensor`, which is batch-free, out of parameters; None if it is another function of them."""
        if tensor.grad_fn is None:
            return whole(tensor)
        return self._made[tensor.grad_fn, tensor.output_nr]

    def call(self, name: str, func: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """(whether the call, whose operands are all batch-free, is covered; its result)."""
        if name in APART:
            result = func(*args, **kwargs)
            self._note_constants(result)
            return True, result
        known = {id(v): self.moved(v) for v in flat((args, kwargs)) if isinstance(v, Tensor) and v.requires_grad}
        function = function_of(name, func, args, kwargs, moved=None not in known.values())
        result = (func if function is None else function)(*args, **kwargs)
        made = [v for v in flat(result) if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]
        floats = any(isinstance(v, Tensor) and v.is_floating_point() for v in flat(result))
        if name == "setitem" or (function is None and (made or (floats and name not in MOVES))):
            return False, None
        moves = moved_by(name, func, args, kwargs, len(made), lambda tensor: known.get(id(tensor)))
        for place, tensor in enumerate(made):
            if tensor.grad_fn is not None:
                self._made[tensor.grad_fn, tensor.output_nr] = moves[place] if moves else None
                self._addresses.add(identity(tensor))
        self._note_constants(result)
        return True, result

    def constant(
        self, name: str, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor]
    ) -> tuple[bool, Any]:
        """(whether the call makes a constant out of constants by a function that is covered on parameters; its result, of
        the same bits). Moves and arithmetic are not among them: they run as they are, and `note` hears of them."""
        floats = all(value.dtype in FLOAT_DTYPES for value in operands)
        if not floats or name in STOCK_ON_CONSTANTS or not operands or not all(map(self.holds_none, operands)):
            return False, None
        function = function_of(name, func, args, kwargs, moved=True)
        if function is None:
            return False, None
        with torch.no_grad():
            result = function(*args, **kwargs)
        self._note_constants(result)
        return True, result

    def _note_constants(self, result: Any) -> None:
        self._constants |= {id(v): v for v in flat(result) if isinstance(v, Tensor) and not v.requires_grad}

    def parameter_below(self, tensor: Tensor) -> Tensor | None:
        """A parameter that a batch-free tensor is made of."""
        return next(iter(self.parameters_below(tensor)), None)

    def parameters_below(self, tensor: Tensor) -> list[Tensor]:
        """The parameters that a batch-free tensor is made of, in the order of the graph."""
        if tensor.grad_fn is None:
            return [tensor]
        found, seen, waiting = {}, set(), [tensor.grad_fn]
        while waiting:
            node = waiting.pop(0)
            if hasattr(node, "variable"):
                found[id(node.variable)] = node.variable
            below = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(below)
            waiting.extend(below)
        return list(found.values())

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it holds no sample and no gradient: a buffer, a frozen parameter, a view of one, or made of them."""
        if self._storages is None:
            held = [*self._model.buffers(), *self._model.parameters()]
            self._storages = {t.untyped_storage().data_ptr() for t in held if t.numel()}
        if tensor.requires_grad:
            return False
        return id(tensor) in self._constants or tensor.untyped_storage().data_ptr() in self._storages

    def holds_none(self, tensor: Tensor) -> bool:
        """Whether it is made of no sample, with a gradient or without."""
        return self(tensor) if tensor.requires_grad else self.is_constant(tensor)

    def note(self, name: str, operands: list[Tensor], result: Any) -> None:
        """A call without gradient was made: of constants alone it makes constants, and with others it spoils them.

        Args:
            operands: of a setitem, the tensor that is written to comes first.
        """
        if name == "setitem":
            made, operands = operands[:1], operands[1:]
        else:
            made = [value for value in flat(result) if isinstance(value, Tensor)]
        free = all(self.is_constant(value) or (value.requires_grad and self(value)) for value in operands)
        for tensor in made:
            if not free or (not operands and tensor.dim() and len(tensor) == self._samples > 1):
                self._constants.pop(id(tensor), None)
            elif not tensor.requires_grad and name != "setitem":
                self._constants[id(tensor)] = tensor
