"""How a loss is made of means over the batch: means times constants, added. Anything else cannot be divided late.

The gradient of a mean is divided once, after the exact sum over the global batch. That is right only if the loss is
linear in its means, and if all of them divide by the same count.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.layers.loss_graph import check_step, name_of, steps_below

MOST_MEANS = 4
STATISTIC = (
    "a mean over the micro-batch: its value depends on how the global batch is cut into micro-batches. It may be logged; "
    "for the loss or a buffer, compute it over the data set before training."
)
_IDENTITIES = frozenset("clone squeeze view reshape contiguous positive alias float double to type".split())
_COMMUTATIVE = frozenset("mul rmul multiply".split())
_SCALINGS = _COMMUTATIVE | frozenset("imul div truediv itruediv true_divide neg".split())
_ADDITIONS = frozenset("add radd iadd sub isub rsub subtract".split())


@dataclass(frozen=True)
class _Term:
    count: int
    places: frozenset[int]  # the means in it
    evaluate: Callable[[dict[int, Tensor]], Tensor]  # the same float operations on other values of the means


class LossTerms:
    """The means recorded while one micro-batch runs forward.

    Attributes:
        values: per mean the per-item values, [n] float32 without gradient.
    """

    def __init__(self):
        self.values: list[Tensor] = []
        self._means: list[Any] = []  # per mean its autograd node
        self._terms: dict[object, _Term] = {}  # autograd node -> term; the node's identity is the key
        self._statistics: dict[int, Tensor] = {}  # by identity: what was made of means and carries no gradient

    def record_mean(self, mean: Tensor, values: Tensor) -> None:
        """`mean` is the exact mean of `values`."""
        if mean.grad_fn is None:
            self.note_statistics([mean])
            return
        place = len(self.values)
        if place == MOST_MEANS:
            raise UncoveredError(f"a loss may be made of at most {MOST_MEANS} means; training_step computes more")
        self.values.append(values.detach())
        self._means.append(mean.grad_fn)
        self._terms[mean.grad_fn] = _Term(values.numel(), frozenset([place]), lambda means: means[place])

    def note_statistics(self, tensors: list[Tensor]) -> None:
        """These hold values of this micro-batch's means: good for logging, but not for the loss, since they depend on
        how the global batch is cut."""
        self._statistics.update({id(tensor): tensor for tensor in tensors})

    def hold_mean(self, operands: Iterable[object]) -> bool:
        """Whether a mean, or what was made of one, is among the operands of a call; to be asked before the call."""
        return any(
            id(value) in self._statistics or value.grad_fn in self._terms
            for value in operands
            if isinstance(value, Tensor)
        )

    def among(self, operands: list[Tensor]) -> dict[int, _Term]:
        """The means among the operands of a call, by identity of the tensor; to be asked before the call."""
        return {id(value): term for value in operands if (term := self._term(value))}

    def record(
        self, name: str, func: Callable, args: tuple, kwargs: dict, means: dict[int, _Term], result: Any
    ) -> bool:
        """Records `result = func(*args, **kwargs)` if it is a function of means: one scaled by a number, two added.

        Args:
            means: those among the operands, from `among`.

        Returns:
            False if the result carries no gradient.

        Raises:
            UncoveredError: a mean enters an operation in which the loss would not be linear in it.
        """
        if isinstance(result, Tensor) and not result.requires_grad:
            return False
        terms = [means.get(id(value)) for value in args]
        if not any(terms) or not isinstance(result, Tensor):
            raise _nonlinear(name)
        numbers = [isinstance(value, (int, float)) for value in args]
        counts = {term.count for term in terms if term}
        if len(counts) > 1:
            raise UncoveredError(
                f"the loss combines a mean over {min(counts)} and a mean over {max(counts)} items. Means of unlike "
                f"counts are not covered: average both over the same items."
            )
        plain = not kwargs and all(term or number for term, number in zip(terms, numbers, strict=True))
        moved = name in _IDENTITIES and terms[0]
        scaled = plain and name in _SCALINGS and sum(map(bool, terms)) == 1
        scaled = scaled and (terms[0] or name in _COMMUTATIVE)
        added = plain and name in _ADDITIONS
        if not (moved or scaled or added):
            raise _nonlinear(name)
        pairs = list(zip(terms, args, strict=True))
        self._terms[result.grad_fn] = _Term(
            counts.pop(),
            frozenset().union(*(term.places for term in terms if term)),
            lambda means: func(*(term.evaluate(means).clone() if term else v for term, v in pairs), **kwargs),
        )
        return True

    def refuse_operands(self, name: str, operands: tuple) -> None:
        """A mean, or what was made of one, may not enter a covered operation."""
        if any(self._term(value) for value in operands):
            raise _nonlinear(name)
        if name != "mean" and self.hold_mean(operands):
            raise UncoveredError(f"{name} is applied to {STATISTIC}")

    def finish(self, loss: Tensor) -> tuple[list[Tensor], Callable[[list[Tensor]], Tensor]]:
        """Of the loss that training_step returned: (per mean in it the per-item values, the loss as a function of
        the means in the same order).

        Raises:
            UncoveredError: the loss is not a sum of recorded means.
        """
        term = self._term(loss)
        if term is None:
            raise UncoveredError(
                'the loss that training_step returned is not a mean that strategy="det" knows, so its gradient cannot '
                "be divided exactly. Return F.cross_entropy(...), values.mean() or "
                "det_lightning.exact_mean(per_item_losses), times constants, or a sum of them."
            )
        places = sorted(term.places)
        for step, below in steps_below(self._means[place] for place in places):
            if below in self._terms:
                raise _nonlinear(name_of(step).lower())
            check_step(below)
        return [self.values[place] for place in places], lambda means: term.evaluate(
            dict(zip(places, means, strict=True))
        )

    def _term(self, value: object) -> _Term | None:
        if isinstance(value, Tensor) and value.grad_fn is not None and torch.is_grad_enabled():
            return self._terms.get(value.grad_fn)
        return None


def _nonlinear(name: str) -> UncoveredError:
    return UncoveredError(
        f"{name} is applied to a mean over the batch: the loss is then not linear in it, so the division by the number "
        f"of items cannot wait for the exact sum over the global batch. Only means times constants and sums of means "
        f"are covered; apply {name} to the per-item values before the mean."
    )
