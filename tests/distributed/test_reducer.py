"""The reducer: gradients are exact sums over everything that was added, divided once by the exact number of items."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.distributed.reducer import GradientReducer
from det_lightning.errors import UncoveredError
from det_lightning.ops.linear import linear
from det_lightning.ops.loss import exact_mean
from tests.claims.processes import on_ranks
from tests.distributed.test_all_reduce import join
from tests.ops.exact_oracle import INF, NAN, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    weight, bias = torch.nn.Parameter(wide_values(1, 3, 4)), torch.nn.Parameter(wide_values(2, 3))
    unused, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return [("weight", weight), ("bias", bias), ("unused", unused), ("frozen", frozen)]


X, UPSTREAM = wide_values(3, 12, 4), wide_values(4, 12, 3)


def add(reducer: GradientReducer, rows: list[int]) -> None:
    """One micro-batch: the digits of these rows, and as many items of the loss."""
    (_, weight), (_, bias) = reducer.parameters[:2]
    linear(X[rows], weight, bias, sink=reducer).backward(UPSTREAM[rows])
    reducer.add_means([UPSTREAM[rows, 0]])


def expected_weight_gradient(rows=range(12), count: int = 12) -> torch.Tensor:
    patterns = [
        rounded([Fraction(UPSTREAM[i, n].item()) * Fraction(X[i, k].item()) for i in rows], torch.float32, count)
        for n in range(3)
        for k in range(4)
    ]
    return from_patterns(patterns, (3, 4), torch.float32)


@given(cuts=st.lists(st.integers(0, 12), max_size=5))
def test_a_gradient_is_one_exact_mean_however_it_was_collected(cuts):
    reducer = GradientReducer(parameters(), means=4)
    edges = [0, *sorted(cuts), 12]
    for first, last in itertools.pairwise(edges):
        add(reducer, list(range(first, last)))
    (mean,), digest = reducer.reduce()
    named = dict(reducer.parameters)
    assert_same_bits(named["weight"].grad, expected_weight_gradient())
    assert named["unused"].grad is None and "frozen" not in named
    assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))
    assert digest == 0


def test_a_reduction_clears_and_a_clear_forgets():
    reducer = GradientReducer(parameters(), means=4)
    add(reducer, [0, 1, 2])
    reducer.clear()
    add(reducer, list(range(12)))
    reducer.add_sample_digest(2**64 - 5)
    reducer.add_sample_digest(2**63 + 7)
    assert reducer.reduce()[1] == (2**64 - 5 + 2**63 + 7) % 2**64
    first = dict(reducer.parameters)["weight"].grad
    add(reducer, list(range(12)))
    assert reducer.reduce()[1] == 0
    assert_same_bits(dict(reducer.parameters)["weight"].grad, first)


def test_a_stand_in_counts_for_nothing():
    reducer = GradientReducer(parameters(), means=4)
    add(reducer, list(range(12)))
    reducer.weightless = True
    add(reducer, [3])
    (mean,), _ = reducer.reduce()
    assert_same_bits(dict(reducer.parameters)["weight"].grad, expected_weight_gradient())
    assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))


def test_without_a_single_item_everything_is_the_canonical_nan():
    reducer = GradientReducer(parameters(), means=4)
    add(reducer, [])
    (mean,), _ = reducer.reduce()
    assert_same_bits(mean, torch.tensor(NAN))
    assert dict(reducer.parameters)["weight"].grad.view(torch.int32).eq(0x7FC00000).all()


def test_means_of_unlike_counts_are_refused():
    reducer = GradientReducer(parameters(), means=4)
    for values in ([torch.ones(3), torch.ones(3)], [torch.ones(3)]):
        reducer.add_means(values)
    with pytest.raises(UncoveredError, match=r"unlike numbers of items over the global batch: \[6, 3\]"):
        reducer.reduce()


def test_a_parameter_that_is_not_known_is_refused():
    reducer = GradientReducer(parameters(), means=4)
    with pytest.raises(UncoveredError, match=r"shape \(2, 5\) that is not in the model"):
        reducer.digits(torch.nn.Parameter(torch.zeros(2, 5)))


def test_special_values_reach_the_gradient():
    reducer = GradientReducer(parameters(), means=4)
    weight = dict(reducer.parameters)["weight"]
    x = torch.tensor([[INF, 1.0, NAN, 0.0]])
    linear(x, weight, sink=reducer).backward(torch.tensor([[1.0, 0.0, -1.0]]))
    reducer.add_means([torch.ones(1)])
    reducer.reduce()
    assert_same_bits(weight.grad, torch.tensor([[INF, 1.0, NAN, 0.0], [NAN, 0.0, NAN, 0.0], [-INF, -1.0, NAN, 0.0]]))


def reduce_part(rank: int, world_size: int, port: int):
    """Ranks with unlike numbers of micro-batches and samples; the last has none."""
    join(rank, world_size, port)
    reducer = GradientReducer(parameters(), means=4)
    for rows in {0: [[0, 1], [2]], 1: [list(range(3, 12))], 2: []}[rank]:
        add(reducer, rows)
    if rank == 2:
        reducer.weightless = True
        add(reducer, [5])
    reducer.add_sample_digest(2**63 + rank)
    (mean,), digest = reducer.reduce()
    gradients = {name: parameter.grad for name, parameter in reducer.parameters}
    return gradients, mean, digest


def test_ranks_add_up_like_micro_batches():
    for gradients, mean, digest in on_ranks(3, reduce_part):
        assert_same_bits(gradients["weight"], expected_weight_gradient())
        assert gradients["unused"] is None
        assert_same_bits(mean, exact_mean(UPSTREAM[:, 0]))
        assert digest == (3 * 2**63 + 3) % 2**64
