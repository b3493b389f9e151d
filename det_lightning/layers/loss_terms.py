"""How a loss is made of means and sums over the batch: they times constants, added. Anything else cannot be divided late.

The gradient of a mean is divided once, after the exact sum over the global batch. That is right only if the loss is
linear in its means. Means that divide by the same number share a backward pass; others have one each.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.layers.batch_free_functions import in_place
from det_lightning.layers.call_names import DIVISIONS
from det_lightning.layers.loss_calls import Items, count_digits
from det_lightning.layers.loss_graph import check_step, name_of, steps_below
from det_lightning.layers.loss_numbers import COMMUTATIVE, SCALINGS, LossNumbers
from det_lightning.layers.loss_plan import Among, LossPlan, Mean, Term, bits_of, structure_of
from det_lightning.ops.canonical import canonical_nan
from det_lightning.ops.means import item_digits, quotient_of, undivided

MOST_MEANS = 8
MOST_DENOMINATORS = 4
STATISTIC = (
    "a mean, an extreme or another arrangement of the samples of the micro-batch: it depends on how the global batch is cut "
    "into micro-batches. It may be logged; for the loss or a buffer, compute it in the data set or before training."
)
_IDENTITIES = frozenset("clone squeeze view reshape contiguous positive alias float double to type detach data".split())
_CONSTANTS = (torch.float32, torch.bfloat16)
_JOINS = frozenset("stack cat concat concatenate hstack vstack".split())
_ADDITIONS = frozenset("add radd iadd sub isub rsub subtract".split())


class LossTerms:
    """The means recorded while one micro-batch runs forward.

    Args:
        samples: of the micro-batch.
        batch_free: says whether a tensor depends on parameters alone.
        is_constant: says whether it is made of buffers and frozen parameters alone.
    """

    def __init__(
        self,
        samples: int = 1,
        batch_free: Callable[[Tensor], bool] = lambda tensor: False,
        is_constant: Callable[[Tensor], bool] = lambda tensor: False,
    ):
        self.samples, self._batch_free, self._is_constant = samples, batch_free, is_constant
        self.means: list[Mean] = []
        self._tensors: list[Tensor] = []  # per mean its tensor, with graph
        self._terms: dict[object, Term] = {}  # autograd node -> term; the node's identity is the key
        self._statistics: dict[int, tuple[Tensor, Term | None]] = {}  # by identity: made of means, without gradient
        self._holds: list[Tensor] = []  # whose identity is in a key
        self.numbers = LossNumbers(samples, is_constant)

    def record_items(self, items: Items) -> Tensor:
        """The mean or sum of items, a tensor without dimensions; its gradient is not divided."""
        digits, total = item_digits(items.values).cpu(), items.reduction == "sum"
        denominator = count_digits(1) if total else items.denominator
        if items.values.requires_grad and torch.is_grad_enabled():
            if not total and items.key[0] == "items" and items.key[1].denominator != 1:
                raise UncoveredError(
                    f"a mean over {items.values.numel()} items of {self.samples} samples: samples were left out or have "
                    f"unlike numbers of items, so that the mean may depend on how the global batch is cut. Say which items "
                    f"count: det_lightning.exact_mean(values, mask), with a mask that is all true if each of them does."
                )
            result = undivided(items.values, digits, denominator)
        else:
            result = quotient_of(digits, denominator)
        result = result.to(items.values.device)
        place = len(self.means)
        self.means.append(Mean(digits, denominator, ("sum",) if total else items.key, total))
        self._tensors.append(result)
        self._holds.extend(items.holds)
        term = Term(frozenset([place]), lambda means, attached: means[place])
        if result.grad_fn is None:
            self._statistics[id(result)] = (result, term)
        else:
            self._terms[result.grad_fn] = term
        return result

    def note_statistics(self, tensors: list[Tensor]) -> None:
        """These hold values of this micro-batch's means: good for logging, but not for the loss, since they depend on
        how the global batch is cut."""
        for tensor in tensors:
            self._statistics[id(tensor)] = (tensor, None)

    def hold_mean(self, operands: Iterable[object]) -> bool:
        """Whether a mean, or what was made of one, is among the operands of a call; to be asked before the call."""
        return any(
            id(value) in self._statistics or value.grad_fn in self._terms
            for value in operands
            if isinstance(value, Tensor)
        )

    def among(self, operands: list[Tensor]) -> Among:
        """The terms among the operands of a call, by identity of the tensor, and whether each carries a gradient; to be
        asked before the call, since an operation in place replaces grad_fn."""
        return {id(v): (term, self._node_term(v) is not None) for v in operands if (term := self.term_of(v))}

    def record(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        among: Among,
        result: Any,
        *,
        with_gradient: bool,
    ) -> bool:
        """Records `result = func(*args, **kwargs)` if it is a function of means: one scaled by a number, two added.

        Args:
            among: the terms among the operands.
            with_gradient: whether an operand carries a gradient.

        Returns:
            False if it is none, and carries no gradient of a mean.

        Raises:
            UncoveredError: a mean enters an operation in which the loss would not be linear in it.
        """
        kept = not isinstance(result, Tensor) or result.requires_grad
        with_gradient = with_gradient and kept
        terms = {key: term for key, (term, carries) in among.items() if carries or not with_gradient}
        if not terms:
            return False
        # An operation in place would change the constant.
        constants = with_gradient and not (in_place(func) and id(args[0]) not in terms)
        combined = isinstance(result, Tensor)
        term = self._combined(name, func, args, kwargs, terms, constants=constants) if combined else None
        if term is None:
            if with_gradient:
                raise _nonlinear(name, args)
            return False
        if result.grad_fn is not None:
            self._refuse_local_numbers(name, args, terms)
            self._terms[result.grad_fn] = term
        else:
            self._statistics[id(result)] = (result, term)
        return True

    def _combined(
        self, name: str, func: Callable, args: tuple, kwargs: dict, terms: dict[int, Term], *, constants: bool
    ) -> Term | None:
        parts: list[Any] = []
        for value in args:
            part = terms.get(id(value))
            if part is None and isinstance(value, Tensor) and value.dim() == 0:
                part = self._without_samples(value, constants=constants)
            parts.append(part)
        found = [part for part in parts if part]
        plain = not kwargs and all(p or isinstance(v, (int, float)) for p, v in zip(parts, args, strict=True))
        moved = name in _IDENTITIES and bool(parts) and bool(parts[0])
        scaled = plain and name in SCALINGS and len(found) == 1 and (parts[0] or name in COMMUTATIVE)
        if not (moved or scaled or (plain and name in _ADDITIONS)) or not any(part.places for part in found):
            return None
        pairs = list(zip(parts, args, strict=True))

        def evaluate(means: dict[int, Tensor], attached: bool) -> Tensor:
            # Clones: an operation in place must not change the values that are handed in.
            return func(*(p.evaluate(means, attached).clone() if p else v for p, v in pairs), **kwargs)

        places = frozenset().union(*(part.places for part in found))
        return Term(places, evaluate, any(part.penalties for part in found))

    def _without_samples(self, value: Tensor, *, constants: bool) -> Term | None:
        """A penalty on parameters, or what it is where they are frozen: a constant."""
        if self._batch_free(value):
            return Term(frozenset(), lambda means, attached: value if attached else value.detach(), True)
        if constants and value.dtype in _CONSTANTS and self._is_constant(value):
            number = value.detach().clone()  # whatever becomes of a buffer later
            return Term(frozenset(), lambda means, attached: number)
        return None

    def _refuse_local_numbers(self, name: str, args: tuple, terms: dict[int, Term]) -> None:
        """A sum divided by the number of samples at hand is a mean of means, whose value depends on the cut."""
        places = [place for value in args if (term := terms.get(id(value))) for place in term.places]
        totals = [place for place in places if self.means[place].total]
        if totals:
            self.numbers.refuse_sample_counts(name, args)

    def refuse_operands(self, name: str, operands: tuple) -> None:
        """A mean, or what was made of one, may not enter a covered operation."""
        if any(isinstance(value, Tensor) and self._node_term(value) for value in operands):
            raise _nonlinear(name, operands)
        if name != "mean" and self.hold_mean(operands):
            raise UncoveredError(f"{name} is applied to {STATISTIC}")

    def finish(self, loss: Tensor) -> LossPlan:
        """What the loss that training_step returned is made of.

        Raises:
            UncoveredError: the loss is not a sum of recorded means.
        """
        term = self._node_term(loss)
        if term is None:
            raise UncoveredError(
                'the loss that training_step returned is not a mean that strategy="det" knows, so its gradient cannot '
                "be divided exactly. Return F.cross_entropy(...), values.mean() or "
                "det_lightning.exact_mean(per_item_losses), times constants, or a sum of them."
            )
        places = sorted(term.places)
        if len(places) > MOST_MEANS:
            raise UncoveredError(f"a loss may be made of at most {MOST_MEANS} means; this one has {len(places)}")
        for step, below in steps_below(self._tensors[place].grad_fn for place in places):
            if below in self._terms:
                raise _nonlinear(name_of(step).lower(), ())
            check_step(below)
        keys = [self.means[place].key for place in places]
        groups = [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]
        if len(groups) > MOST_DENOMINATORS:
            raise UncoveredError(
                f"the means of the loss divide by {len(groups)} unlike numbers of items; at most {MOST_DENOMINATORS} are "
                f"covered, since each takes a backward pass of its own. Average more of them over the same items."
            )

        means, value = self.made_of(loss)

        def partial(group: int | None) -> Tensor | None:
            if group is None and not term.penalties:
                return None
            if group is not None and len(groups) == 1 and not term.penalties:
                return loss
            inside = () if group is None else groups[group]
            tensors = [self._tensors[p] if i in inside else self._tensors[p].detach() for i, p in enumerate(places)]
            return term.evaluate(dict(zip(places, tensors, strict=True)), group is None)

        return LossPlan(
            means, groups, partial, value, structure_of(groups, means, value, self.numbers.seen), bits_of(groups)
        )

    def made_of(self, value: object) -> tuple[list[Mean] | None, Callable[[list[Tensor]], Tensor] | None]:
        """(the means that a value is a function of, the value as a function of them), or (None, None)."""
        term = self.term_of(value)
        if term is None:
            return None, None
        places = sorted(term.places)

        def evaluate(means: list[Tensor]) -> Tensor:
            here = [mean.to(self._tensors[place].device) for place, mean in zip(places, means, strict=True)]
            with torch.no_grad():
                return canonical_nan(term.evaluate(dict(zip(places, here, strict=True)), False))

        return [self.means[place] for place in places], evaluate

    def term_of(self, value: object) -> Term | None:
        """The function of means that a tensor is, whether it carries a gradient or not."""
        if not isinstance(value, Tensor):
            return None
        term = self._node_term(value)
        return self._statistics[id(value)][1] if term is None and id(value) in self._statistics else term

    def _node_term(self, value: Tensor) -> Term | None:
        return None if value.grad_fn is None else self._terms.get(value.grad_fn)


def _nonlinear(name: str, operands: tuple) -> UncoveredError:
    if name in DIVISIONS and len(operands) == 2 and all(isinstance(value, Tensor) for value in operands):
        return UncoveredError(
            f"{name} is applied to a mean or sum over the batch and a tensor: the number of items to divide by is the "
            f"one over the global batch. Write det_lightning.exact_mean(values, mask), mask true where an item counts."
        )
    if name in _JOINS:
        return UncoveredError(
            f"{name} is applied to means over the batch. Add them as they are, each times a number: first + 0.5 * second, "
            f"or sum(losses)."
        )
    if name in _ADDITIONS:
        return UncoveredError(
            f"{name} is applied to a mean over the batch and a tensor that is not one. Covered are sums of means times "
            f"numbers, buffers, and penalties on parameters alone; under Fabric a penalty is computed in the model's "
            f"forward. Of values of samples take the mean or the sum first."
        )
    return UncoveredError(
        f"{name} is applied to a mean over the batch: the loss is then not linear in it, so the division by the number "
        f"of items cannot wait for the exact sum over the global batch. Only means times numbers and sums of means "
        f"are covered; apply {name} to the per-item values before the mean."
    )
