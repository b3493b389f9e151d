"""The norm of all gradients: the square root of the exact sum of squares, rounded once; and the clipping made of it."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.optim.gradient_norm import clip_gradients_by_norm, clip_gradients_by_value, gradient_norm
from tests.ops.exact_oracle import INF, LARGEST, NAN, SMALLEST, any_patterns, wide_values
from tests.same_bits import assert_same_bits

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def is_nearest_root(root: torch.Tensor, square: Fraction) -> bool:
    """Whether the float32 `root` is nearest to the square root of `square`, by comparing squares of midpoints."""
    pattern = int(root.view(torch.int32))
    neighbours = torch.tensor([max(pattern - 1, 0), pattern, pattern + 1], dtype=torch.int32).view(torch.float32)
    below, here, above = (Fraction(value) if math.isfinite(value) else None for value in neighbours.tolist())
    if here is None:
        return square >= ((Fraction(LARGEST) + Fraction(2) ** 128) / 2) ** 2
    above = Fraction(2) ** 128 if above is None else above
    low, high = ((below + here) / 2) ** 2, ((here + above) / 2) ** 2
    even = pattern % 2 == 0
    return (low <= square if even else low < square or pattern == 0) and (square <= high if even else square < high)


def sum_of_squares(values) -> Fraction:
    return sum((Fraction(value) ** 2 for value in values), Fraction(0))


@given(st.lists(FINITE, max_size=12))
def test_it_is_the_float_nearest_to_the_root_of_the_exact_sum(values):
    assert is_nearest_root(gradient_norm([torch.tensor(values, dtype=torch.float32)]), sum_of_squares(values))


@pytest.mark.parametrize("spread", [0.0, 2.0, 12.0])
def test_ordinary_and_wide_gradients(spread):
    for seed in range(20):
        gradients = [wide_values(seed, 7, 5, spread=spread), wide_values(seed + 50, 3, spread=spread)]
        values = [value for gradient in gradients for value in gradient.flatten().tolist()]
        assert is_nearest_root(gradient_norm(gradients), sum_of_squares(values))


def test_ties_and_perfect_squares():
    for values, root in (
        ([3.0, 4.0], 5.0),
        ([2.0**-149], 2.0**-149),
        ([2.0**-149] * 4, 2.0**-148),
        ([2.0**-149] * 2, 2.0**-149),  # 1.41 of the smallest rounds down,
        ([2.0**-149] * 3, 2.0**-148),  # 1.73 of it up
        ([LARGEST], LARGEST),
        ([0.0, -0.0], 0.0),
        ([], 0.0),
    ):
        assert_same_bits(gradient_norm([torch.tensor(values)]), torch.tensor(root))


def test_a_sum_of_squares_beyond_float32_and_float64_still_has_its_norm():
    assert_same_bits(gradient_norm([torch.full((4,), 2.0**100)]), torch.tensor(2.0**101))
    assert_same_bits(gradient_norm([torch.full((4,), LARGEST)]), torch.tensor(INF))
    assert_same_bits(gradient_norm([torch.full((16,), 2.0**-140)]), torch.tensor(2.0**-138))
    assert torch.full((4,), 2.0**100).square().sum().isinf()
    assert torch.full((16,), 2.0**-140).square().sum() == 0


@pytest.mark.parametrize(
    ("values", "norm"), [([NAN, 1.0], NAN), ([INF, 1.0], INF), ([-INF, INF], INF), ([INF, NAN], NAN)]
)
def test_special_values(values, norm):
    assert_same_bits(gradient_norm([torch.tensor(values)]), torch.tensor(norm))


@given(order=st.permutations(range(24)), cuts=st.lists(st.integers(0, 24), max_size=4))
def test_it_does_not_depend_on_order_or_sharding(order, cuts):
    values = wide_values(3, 24)
    shards, edges = values[list(order)], [0, *sorted(cuts), 24]
    parts = [shards[first:last] for first, last in itertools.pairwise(edges)]
    assert_same_bits(gradient_norm(parts), gradient_norm([values]))


def test_the_stock_norm_fails_the_same_check():
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    stock = torch.nn.utils.get_total_norm([values])
    sharded = torch.nn.utils.get_total_norm(list(values.split(17_000)))
    exact = gradient_norm([values])
    assert is_nearest_root(exact, sum_of_squares(values.tolist()))
    assert_same_bits(gradient_norm(values.split(17_000)), exact)
    assert len({int(each.view(torch.int32)) for each in (stock, sharded, exact)}) > 1


# Clipping


def clipped(gradients: list[torch.Tensor], limit: float):
    gradients = [gradient.clone() for gradient in gradients]
    norm, coefficient = clip_gradients_by_norm(gradients, limit)
    return gradients, norm, coefficient


@np.errstate(all="ignore")
@pytest.mark.parametrize("limit", [0.05, 1.0, 1e-30, 1e30])
def test_clipping_is_the_written_sequence(limit):
    gradients = [wide_values(4, 6, 5, spread=2.0), wide_values(5, 3, spread=2.0)]
    scaled, norm, coefficient = clipped(gradients, limit)
    assert_same_bits(norm, gradient_norm(gradients))
    c = np.float32(limit) / (norm.numpy() + np.float32(1e-6))
    c = c if c < 1 else np.float32(1)
    assert_same_bits(coefficient, torch.tensor(c))
    for ours, gradient in zip(scaled, gradients, strict=True):
        assert_same_bits(ours, torch.from_numpy(gradient.numpy() * c))


def test_small_gradients_are_not_touched():
    gradients = [torch.tensor([3e-3, -4e-3, -0.0])]
    scaled, norm, coefficient = clipped(gradients, 1.0)
    assert_same_bits(scaled[0], gradients[0])
    assert coefficient == 1
    assert_same_bits(norm, gradient_norm(gradients))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([NAN, 1.0], [NAN, NAN]),
        ([INF, 1.0], [NAN, 0.0]),
        ([0.0, -0.0], [0.0, -0.0]),
        ([SMALLEST, -SMALLEST], [SMALLEST, -SMALLEST]),
    ],
)
def test_clipping_special_gradients(values, expected):
    scaled, _, _ = clipped([torch.tensor(values)], 1.0)
    assert_same_bits(scaled[0], torch.tensor(expected))
    assert set(scaled[0][scaled[0].isnan()].view(torch.int32).tolist()) <= {0x7FC00000}


def test_no_gradients_at_all():
    norm, coefficient = clip_gradients_by_norm([], 1.0)
    assert_same_bits(norm, torch.tensor(0.0))
    assert_same_bits(coefficient, torch.tensor(1.0))


def test_any_bits():
    gradients = [any_patterns(6, 50)]
    finite = gradients[0][gradients[0].isfinite()]
    assert is_nearest_root(gradient_norm([finite]), sum_of_squares(finite.tolist()))


def test_clipping_by_value_moves_what_is_outside_and_nothing_else():
    gradient = torch.tensor([0.5, -0.5, 0.1, 7.0, -INF, INF, NAN, 0.0, -0.0, 2.0**-149])
    clip_gradients_by_value([gradient], 0.1)
    limit = torch.tensor(0.1)
    expected = torch.stack([limit, -limit, limit, limit, -limit, limit, *torch.tensor([NAN, 0.0, -0.0, 2.0**-149])])
    assert_same_bits(gradient, expected)
    with pytest.raises(InputError, match="limit above 0"):
        clip_gradients_by_value([gradient], 0.0)
