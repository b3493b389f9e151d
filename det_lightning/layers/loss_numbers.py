"""The numbers that items and activations of a micro-batch are computed with: one that depends on the samples at hand, or on
how many they are, makes the training depend on how the global batch is cut.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.layers.call_names import DIVISIONS, IEEE, flat

COMMUTATIVE = frozenset("mul rmul multiply".split())
SCALINGS = COMMUTATIVE | DIVISIONS | frozenset("imul neg".split())
# Functions of which an integer is a value; elsewhere it is a size or a place.
_BY_VALUE = IEEE | frozenset(
    "eq ne ge gt le lt pow rpow clamp clip clamp_min clamp_max masked_fill where fill tensor as_tensor scalar_tensor".split()
)


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
        self._apart: dict[int, ref] = {}  # by identity, made in this micro-batch of no sample
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
        if not any(value.requires_grad for value in made) and all(map(self.holds_no_samples, operands)):
            self._apart |= {id(value): ref(value) for value in made}  # it may be kept for later micro-batches
            return
        whole = name in _BY_VALUE
        # Not those in lists, which are values of samples.
        given = (*args, *kwargs.values())
        found = {float(value) for value in given if isinstance(value, float) or (whole and type(value) is int)}
        for value in operands:
            found |= self._made_with(value)
        for value in made:
            self._apart.pop(id(value), None)
            if value.requires_grad:
                self.seen |= found
            elif found:
                self._carried[id(value)] = (ref(value), frozenset(found))

    def holds_no_samples(self, value: Tensor) -> bool:
        made = self._apart.get(id(value))
        return (made is not None and made() is value) or self._is_constant(value)

    def _made_with(self, value: Tensor) -> set[float] | frozenset[float]:
        if self.holds_no_samples(value):  # a number is told by its value, whenever it was made
            number = value.is_cpu and value.is_floating_point() and value.dim() == 0
            return {value.item()} if number else frozenset()
        tensor, numbers = self._carried.get(id(value), (None, frozenset()))
        return numbers if tensor is not None and tensor() is value else frozenset()

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


def _numbers(args: tuple) -> list[float]:
    return [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _mean_of_means(divisor: float) -> UncoveredError:
    return UncoveredError(
        f"a sum over the micro-batch is divided by {divisor:g}, the number of its samples, which depends on how the global "
        f"batch is cut. Write the mean: reduction='mean', values.mean() or det_lightning.exact_mean(values, mask)."
    )
