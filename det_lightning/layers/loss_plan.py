"""What a loss is made of, and how it goes backward: the values that `LossTerms` records and hands over."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """One mean (or sum) over the items of a micro-batch.

    Attributes:
        digits: int64 [NB], the exact sum of its items.
        denominator: int64 [NB], what it divides by in this micro-batch; for a sum, 1.
        key: means of one key divide by the same number over every global batch.
        total: a sum: its denominator is 1 however many micro-batches there are.
    """

    digits: Tensor
    denominator: Tensor
    key: tuple
    total: bool


# What a term is, on other values of the means: (place -> value, whether penalties keep their graph) -> value.
Evaluate = Callable[[dict[int, Tensor], bool], Tensor]


@dataclass(frozen=True)
class Term:
    """A function of means: constants times them, added.

    Attributes:
        places: the means in it.
        penalties: whether something that depends on parameters alone is in it.
    """

    places: frozenset[int]
    evaluate: Evaluate
    penalties: bool = False


Among = dict[int, tuple[Term, bool]]


@dataclass(frozen=True)
class LossPlan:
    """How the loss of a micro-batch goes backward.

    Attributes:
        means: those in it.
        groups: places in `means` that share a denominator, one backward pass each.
        partial: (group) -> the loss with a graph through that group's means only; (None) -> through what depends on
            parameters alone, or None without any.
        evaluate: (value of each mean) -> the loss, float32.
        structure: 20 bits that are the same in every micro-batch whose loss is made alike.
        pattern: 20 bits of the grouping alone.
    """

    means: list[Mean]
    groups: list[list[int]]
    partial: Callable[[int | None], Tensor | None]
    evaluate: Callable[[list[Tensor]], Tensor]
    structure: int
    pattern: int


def structure_of(
    groups: list[list[int]],
    means: list[Mean],
    evaluate: Callable[[list[Tensor]], Tensor],
    numbers: Iterable[float] = (),
) -> int:
    """20 bits of how a loss is made: grouping, the value at each unit of the means, hence the constants, and `numbers`."""
    count = len(means)
    probes = [torch.zeros(count), *torch.eye(count)]
    values = [evaluate(list(probe.unbind())).double().item().hex() for probe in probes]
    constants = sorted({float(number).hex() for number in numbers})
    text = (groups, [(mean.total, mean.key if mean.key[0] == "items" else None) for mean in means], values, constants)
    return bits_of(text)


def bits_of(value: object) -> int:
    """20 bits of a value's text."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=4).digest()) >> 12
