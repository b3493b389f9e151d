"""A reducer of one layer with known samples, and the gradient that it is to reach."""

from fractions import Fraction

import torch

from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.layers.loss_calls import count_digits
from det_lightning.ops.linear import linear
from det_lightning.ops.means import item_digits
from tests.ops.exact_oracle import from_patterns, rounded, wide_values


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    weight, bias = torch.nn.Parameter(wide_values(1, 3, 4)), torch.nn.Parameter(wide_values(2, 3))
    unused, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return [("weight", weight), ("bias", bias), ("unused", unused), ("frozen", frozen)]


X, UPSTREAM = wide_values(3, 12, 4), wide_values(4, 12, 3)


def collector(**options) -> GradientReducer:
    return GradientReducer(parameters(), means=4, **options)


def part_of(values: torch.Tensor) -> MeanPart:
    return MeanPart(item_digits(values), count_digits(values.numel()))


def add(reducer: GradientReducer, rows: list[int], *, last: bool = False) -> None:
    """One micro-batch: the digits of these rows, and as many items of the loss."""
    (_, weight), (_, bias) = reducer.parameters[:2]
    reducer.expect(weight)
    reducer.expect(bias)
    reducer.add_loss([part_of(UPSTREAM[rows, 0])], [[0]], 7)
    reducer.begin(0, last=last)
    linear(X[rows], weight, bias, sink=reducer).backward(UPSTREAM[rows])
    reducer.end()


def expected_weight_gradient(rows=range(12), count: int = 12) -> torch.Tensor:
    patterns = [
        rounded([Fraction(UPSTREAM[i, n].item()) * Fraction(X[i, k].item()) for i in rows], torch.float32, count)
        for n in range(3)
        for k in range(4)
    ]
    return from_patterns(patterns, (3, 4), torch.float32)
