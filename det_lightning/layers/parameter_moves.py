"""Moves of parameters' elements (views, slices, transposes, concatenations, casts): digits follow them without rounding.

A tensor made of parameters by moves alone is described by the moves. The digits of its gradient are added to those of the
parameters at the places where its elements came from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from det_lightning.arithmetic.formats import NB
from det_lightning.layers.call_names import is_basic_index

_VIEWS = frozenset(
    """view reshape flatten unflatten permute transpose t swapaxes movedim squeeze unsqueeze narrow select split chunk
    unbind T mT ravel getitem""".split()
)
_JOINS = frozenset("cat concat concatenate stack index_select".split())
_SAME_ELEMENTS = frozenset("contiguous clone to float bfloat16 half type positive alias".split())
MOVES = _VIEWS | _JOINS | _SAME_ELEMENTS


@dataclass(frozen=True)
class Moved:
    """What parameters were moved, and how.

    Attributes:
        parameters: in the order of their first use.
        replay: (stand-in of each parameter) -> the same moves of the stand-ins.
        copies: some move is certainly no view.
    """

    parameters: tuple[Tensor, ...]
    replay: Callable[[Callable[[Tensor], Tensor]], Tensor]
    copies: bool = False

    @cached_property
    def view(self) -> tuple[torch.Size, tuple[int, ...], int] | None:
        """(sizes, strides, offset) of this tensor's elements among those of its one parameter; None if it is no view."""
        if self.copies or len(self.parameters) > 1:
            return None
        whole = torch.empty(self.parameters[0].shape, dtype=torch.int64, device="meta")
        places = self.replay(lambda parameter: whole)
        if places is not whole and places._base is not whole:
            return None
        return places.shape, places.stride(), places.storage_offset()

    @cached_property
    def is_whole(self) -> bool:
        """Whether it is its one parameter, each element in its place."""
        shape = self.parameters[0].shape
        return self.view == (shape, torch.empty(shape, device="meta").stride(), 0)

    @cached_property
    def is_transposed(self) -> bool:
        """Whether it is the transpose of its one parameter, a matrix."""
        shape = self.parameters[0].shape
        return len(shape) == 2 and self.view == (shape[::-1], (1, shape[1]), 0)

    def view_of(self, digits: Tensor) -> Tensor:
        """The digits [*sizes, NB] of this tensor's elements as a view of those of its parameter. Requires: `view`."""
        sizes, strides, offset = self.view
        places = (*(stride * NB for stride in strides), 1)
        return digits.as_strided((*sizes, NB), places, digits.storage_offset() + offset * NB)

    def add(self, parameter: Tensor, digits: Tensor, moved: Tensor) -> None:
        """Adds the digits of this tensor's elements to those of one of its parameters.

        Args:
            digits: int64 [*parameter.shape, NB], contiguous.
            moved: int64 [*sizes, NB].
        """

        def numbers(other: Tensor) -> Tensor:
            if other is not parameter:
                return torch.full(other.shape, -1, dtype=torch.int64, device=moved.device)
            return torch.arange(other.numel(), device=moved.device).view(other.shape)

        places = self.replay(numbers).reshape(-1)
        here = places >= 0
        digits.view(-1, NB).index_add_(0, places[here], moved.reshape(-1, NB)[here])


def whole(parameter: Tensor) -> Moved:
    """The parameter itself."""
    return Moved((parameter,), lambda stand_in: stand_in(parameter))


def moved_by(
    name: str, func: Callable, args: tuple, kwargs: dict, results: int, known: Callable[[Tensor], Moved | None]
) -> list[Moved]:
    """What the outputs of a call are, one each; empty if it is no move of tensors that are known by their moves.

    Args:
        results: how many outputs there are.
        known: what a tensor is made of, or None.
    """
    operands: list[Moved | None] = []

    def described(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [described(item) for item in value] if isinstance(value, list) else tuple(map(described, value))
        if isinstance(value, Tensor) and value.is_floating_point():
            operands.append(known(value))
            return operands[-1]
        return value

    arguments = described(args)
    if name not in MOVES or not operands or None in operands:
        return []
    if name in _SAME_ELEMENTS:
        return operands[:1]
    func = Tensor.reshape if name == "view" else func  # a stand-in may not be contiguous where the tensor is
    copies = name in _JOINS or (name == "getitem" and not is_basic_index(args[1])) or any(o.copies for o in operands)
    parameters = tuple({id(p): p for operand in operands for p in operand.parameters}.values())

    def replay(stand_in: Callable[[Tensor], Tensor]) -> Any:
        return func(*_replayed(arguments, stand_in), **kwargs)

    if results == 1:
        return [Moved(parameters, lambda stand_in: _only(replay(stand_in)), copies)]
    return [Moved(parameters, lambda stand_in, i=i: replay(stand_in)[i], copies) for i in range(results)]


def _only(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value


def _replayed(value: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Moved):
        return value.replay(stand_in)
    if isinstance(value, (tuple, list)):
        return type(value)([_replayed(item, stand_in) for item in value])
    return value
