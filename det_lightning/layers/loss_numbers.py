"""The numbers that items and activations of a micro-batch are computed with: one that depends on the samples at hand, or on
how many they are, makes the training depend on how the global batch is cut.
"""

import math
from collections.abc import Callable, Collection
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.layers.call_names import DIVISIONS, IEEE, flat

COMMUTATIVE = frozenset("mul rmul multiply".split())
SCALINGS = COMMUTATIVE | DIVISIONS | frozenset("imul neg".split())
# Functions of which an integer is a value; elsewhere it is a size or a place.
_BY_VALUE = IEEE | frozenset(
    "eq ne ge gt le lt pow rpow clamp clip clamp_min clamp_max masked_fill where fill tensor as_tensor scalar_tensor".split()
)
# Every element of the result is one number.
_FILLS = frozenset("full full_like new_full fill".split())
# Of a tensor made of no sample: what it was filled with. It may be kept for later micro-batches, so it tells by itself.
_ATTRIBUTE = "_det_lightning_numbers"


class LossNumbers:
    """Those of one micro-batch.

    Args:
        samples: of the micro-batch.
        is_constant: says whether a tensor is made of no sample and carries no gradient.

    Attributes:
        seen: all that reach a gradient; every micro-batch of a step is to have the same.
    """

    def __init__(self, samples: int, is_constant: Callable[[Tensor], bool]):
        self._samples, self._is_constant = samples, is_constant
        self.seen: set[float] = set()
        self._carried: dict[int, tuple[ref, frozenset[float]]] = {}  # by identity, of what was made with numbers
        self._divided: dict[object, float] = {}  # autograd node of what was divided by the number of samples -> it

    def note(self, name: str, args: tuple, result: Tensor) -> None:
        """A call on items or activations that gave `result`."""
        count = self._sample_count(name, args)
        if count is not None:
            self._divided[result.grad_fn] = count

    def follow(self, name: str, args: tuple, kwargs: dict, operands: list[Tensor], result: Any) -> None:
        """A call was made: its numbers are seen, with those that its operands were made with, if the result has a gradient;
        without one, they wait for a call in which it meets one."""
        made = [value for value in flat(args[0] if name == "setitem" else result) if isinstance(value, Tensor)]
        if (name in _FILLS or all(map(self.holds_no_samples, operands))) and not any(v.requires_grad for v in made):
            numbers = tuple(self._fillings(name, args, kwargs, operands))
            for value in made:
                setattr(value, _ATTRIBUTE, () if value.dtype is torch.bool else numbers)
            return
        found = _given(name, args, kwargs)
        for value in operands:
            found.update(self._made_with(value, by_value=name in _BY_VALUE))
        for value in made:
            if getattr(value, _ATTRIBUTE, None) is not None:  # samples were written into it
                setattr(value, _ATTRIBUTE, None)
            if value.requires_grad:
                self.seen |= found
            elif found:
                self._carried[id(value)] = (ref(value), frozenset(found))

    def _fillings(self, name: str, args: tuple, kwargs: dict, operands: list[Tensor]) -> set[float]:
        """What a call on tensors made of no sample fills its result with. Not what comes in lists or is written at places,
        which may be of samples, and no infinity, which only masks. Where nothing was filled, the numbers of calls count
        for nothing: a table of arange may be made in one micro-batch and kept for the others."""
        if name in _FILLS:
            shape = 0 if name == "full" else 1  # the others take a tensor's
            found = _given(name, args, kwargs).union(*(self._made_with(v, by_value=True) for v in operands[shape:]))
            return set(filter(math.isfinite, found))
        if name == "setitem":
            return set(self._made_with(args[0], by_value=True))
        if name == "one_hot" or (args and isinstance(args[0], (list, tuple))):
            return set()
        by_value = name in _BY_VALUE or len(operands) == 1  # with others, an integer may be a place
        found = set().union(*(self._made_with(value, by_value=by_value) for value in operands))
        return found and found | _given(name, args, kwargs)

    def holds_no_samples(self, value: Tensor) -> bool:
        return getattr(value, _ATTRIBUTE, None) is not None or self._is_constant(value)

    def _made_with(self, value: Tensor, *, by_value: bool) -> Collection[float]:
        """The numbers of an operand; those of integers only if the call takes an integer `by_value`."""
        if not self.holds_no_samples(value):
            tensor, numbers = self._carried.get(id(value), (None, frozenset()))
            return numbers if tensor is not None and tensor() is value else frozenset()
        if not value.is_floating_point() and (not by_value or value.is_complex() or value.dtype is torch.bool):
            return ()
        if value.is_cpu and value.dim() == 0:  # told by its value, whenever it was made
            return (float(value),)
        return getattr(value, _ATTRIBUTE, None) or ()

    def refuse_sum(self, values: Tensor) -> None:
        """Raises UncoveredError for the sum of items that were divided by the number of samples at hand."""
        if values.grad_fn in self._divided:
            raise _mean_of_means(self._divided[values.grad_fn])

    def refuse_sample_counts(self, name: str, args: tuple) -> None:
        """Raises UncoveredError for a sum that is divided by the number of samples at hand: a mean of means."""
        count = self._sample_count(name, args)
        if count is not None:
            raise _mean_of_means(count)

    def _sample_count(self, name: str, args: tuple) -> float | None:
        """The number of samples, if the call divides by it."""
        for number in _numbers(args) if name in SCALINGS else ():
            divisor = number if name in DIVISIONS or not number else 1.0 / number
            if divisor > 1 and abs(divisor - self._samples) < 1e-6 * divisor:
                return divisor
        return None


def _given(name: str, args: tuple, kwargs: dict) -> set[float]:
    """The numbers of a call; not those in lists, which are values of samples, or sizes."""
    whole = name in _BY_VALUE or name in _FILLS
    given = (*args, *(value for key, value in kwargs.items() if key != "device"))
    return {float(value) for value in given if isinstance(value, float) or (whole and type(value) is int)}


def _numbers(args: tuple) -> list[float]:
    return [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _mean_of_means(divisor: float) -> UncoveredError:
    return UncoveredError(
        f"a sum over the micro-batch is divided by {divisor:g}, the number of its samples, which depends on how the global "
        f"batch is cut. Write the mean: reduction='mean', values.mean() or det_lightning.exact_mean(values, mask)."
    )
