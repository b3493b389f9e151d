"""cross_entropy against its written sequence on Python numbers, and the mean that is divided once."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from det_lightning.arithmetic import elementary
from det_lightning.errors import InputError
from det_lightning.ops.loss import cross_entropy_items, exact_mean
from tests.ops.exact_oracle import (
    INF,
    NAN,
    NEGATIVE_INF,
    SMALLEST,
    any_patterns,
    cancelling_pair,
    from_patterns,
    rounded,
    wide_values,
)
from tests.same_bits import assert_same_bits

F32 = np.float32


def bits(value: np.float32) -> int:
    return int(value.view(np.uint32))


def of_bits(pattern: int) -> np.float32:
    return np.uint32(pattern).view(np.float32)


@np.errstate(all="ignore")
def reference(logits: np.ndarray, target: np.ndarray, upstream: np.ndarray):
    """The sequence of the module's head, one row at a time: (losses, gradients)."""
    losses, gradients = [], []
    for row, t, g in zip(logits, target, upstream, strict=True):
        d = [F32(x - row.max()) for x in row]
        e = [of_bits(elementary.exp(bits(value))) for value in d]
        s = of_bits(rounded([float(value) for value in e], torch.float32))
        losses.append(F32(of_bits(elementary.log(bits(s))) - d[t]))
        p = [F32(value / s) for value in e]
        gradients.append([F32(g * F32(value - F32(j == t))) for j, value in enumerate(p)])
    return torch.from_numpy(np.array(losses, F32)), torch.from_numpy(np.array(gradients, F32))


def computed(logits: torch.Tensor, target: torch.Tensor, upstream: torch.Tensor, **options):
    logits = logits.clone().requires_grad_()
    losses = cross_entropy_items(logits, target, **options)
    losses.backward(upstream)
    return losses.detach(), logits.grad


ROWS = {
    "ordinary": lambda: torch.randn(40, 7, generator=torch.Generator().manual_seed(1)) * 4,
    "wide": lambda: wide_values(2, 40, 7, spread=2.0),
    "far apart": lambda: torch.tensor([[0.0, -80.0, -100.0, -110.0], [90.0, 0.0, -3.0, 89.5], [3e38, -3e38, 0.0, 1.0]]),
    "equal": lambda: torch.full((3, 5), 0.1),
    "one class": lambda: wide_values(3, 4, 1),
    "subnormal": lambda: torch.tensor([[SMALLEST, 0.0, -SMALLEST], [2.0**-126, -(2.0**-126), 0.0]]),
    "special": lambda: torch.tensor(
        [[NAN, 0.0, 1.0], [INF, 0.0, 1.0], [NEGATIVE_INF, 0.0, 1.0], [NEGATIVE_INF] * 3, [INF, INF, 0.0]]
    ),
    "any bits": lambda: any_patterns(4, 30, 3),
    "signed zeros": lambda: torch.tensor([[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]]),
    "no rows": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_gradients_are_the_written_sequence(name):
    logits = ROWS[name]()
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, logits.shape[1], (len(logits),), generator=generator)
    upstream = torch.randn(len(logits), generator=generator)
    losses, gradients = computed(logits, target, upstream)
    expected = reference(logits.numpy(), target.numpy(), upstream.numpy())
    assert_same_bits(losses, expected[0])
    assert_same_bits(gradients, expected[1].view(logits.shape))


def test_the_values_are_near_the_stock_ones():
    """A check of the formula, not of bits: the stock kernel rounds elsewhere."""
    logits = ROWS["ordinary"]()
    target = torch.arange(40) % 7
    losses, gradients = computed(logits, target, torch.ones(40))
    stock = logits.clone().double().requires_grad_()
    F.cross_entropy(stock, target, reduction="sum").backward()
    assert (losses - F.cross_entropy(stock, target, reduction="none")).abs().max() < 1e-5
    assert (gradients - stock.grad).abs().max() < 1e-6


def test_the_stock_loss_fails_the_same_check():
    logits = torch.randn(97, 10, generator=torch.Generator().manual_seed(6)) * 9
    target = torch.arange(97) % 10
    losses, _ = reference(logits.numpy(), target.numpy(), np.ones(97, F32))
    assert (F.cross_entropy(logits, target, reduction="none").view(torch.int32) != losses.view(torch.int32)).any()


def test_a_row_does_not_depend_on_the_rows_around_it():
    logits = torch.randn(97, 10, generator=torch.Generator().manual_seed(6)) * 9
    target = torch.arange(97) % 10
    losses, gradients = computed(logits, target, torch.ones(97))
    for first, last in ((0, 1), (7, 10), (40, 97)):
        part = computed(logits[first:last], target[first:last], torch.ones(last - first))
        assert_same_bits(part[0], losses[first:last])
        assert_same_bits(part[1], gradients[first:last])


def test_every_nan_is_canonical():
    for name in ("special", "any bits"):
        logits = ROWS[name]()
        target = torch.zeros(len(logits), dtype=torch.int64)
        for result in computed(logits, target, torch.ones(len(logits))):
            assert set(result[result.isnan()].view(torch.int32).tolist()) <= {0x7FC00000}
            assert name != "special" or result.isnan().any()


def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold():
    logits, target = ROWS["special"](), torch.tensor([0, -7, 1, -7, -7])
    losses, gradients = computed(logits, target, torch.full((5,), INF), ignore_index=-7)
    assert_same_bits(losses[[1, 3, 4]], torch.zeros(3))
    assert_same_bits(gradients[[1, 3, 4]], torch.zeros(3, 3))
    expected = computed(logits[[0, 2]], target[[0, 2]], torch.full((2,), INF))
    assert_same_bits(losses[[0, 2]], expected[0])
    assert_same_bits(gradients[[0, 2]], expected[1])


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), r"target\[1\] = 3 is outside \[0, 3\)"),
        (torch.zeros(2, 3), torch.tensor([-100, 0]), r"target\[0\] = -100 is outside \[0, 3\)"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), r"target torch\.float32 \(2,\)"),
        (torch.zeros(2, 3), torch.tensor([0, 1], dtype=torch.int32), r"target torch\.int32"),
        (torch.zeros(2, 3), torch.tensor([0]), r"logits \(2, 3\) and target torch\.int64 \(1,\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64), "one row an item"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), r"\[M, C >= 1\]"),
        (torch.zeros(2, 3).double(), torch.zeros(2, dtype=torch.int64), "float64"),
    ],
)
def test_what_is_not_one_class_a_row_is_refused(logits, target, message):
    with pytest.raises(InputError, match=message):
        cross_entropy_items(logits, target)


# The mean


@pytest.mark.parametrize("count", [1, 3, 41, 64, 1000])
def test_the_mean_is_the_exact_sum_over_the_exact_count(count):
    values = wide_values(count, count)
    exact = rounded([Fraction(value) for value in values.tolist()], torch.float32, denominator=count)
    assert_same_bits(exact_mean(values), from_patterns([exact], (), torch.float32))
    assert_same_bits(exact_mean(values[torch.randperm(count)].reshape(-1, 1)), exact_mean(values))


def test_the_stock_mean_fails_the_same_check():
    values = cancelling_pair(7, 100)[1].view(-1)
    assert values.mean().view(torch.int32) != exact_mean(values).view(torch.int32)


def test_outside_a_strategy_the_gradient_is_divided_once_and_inside_not_at_all():
    for undivided, each in ((False, F32(1) / F32(41)), (True, F32(1))):
        values = torch.zeros(41, requires_grad=True)
        exact_mean(values, undivided=undivided).backward()
        assert_same_bits(values.grad, torch.full((41,), float(each)))


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([], NAN),
        ([NAN, 1.0], NAN),
        ([INF, 1.0], INF),
        ([INF, NEGATIVE_INF], NAN),
        ([-0.0, -0.0], 0.0),
        ([3e38, 3e38], 3e38),
        ([SMALLEST, 0.0], 0.0),
        ([SMALLEST, SMALLEST, SMALLEST, 0.0], SMALLEST),
    ],
)
def test_special_means(values, mean):
    assert_same_bits(exact_mean(torch.tensor(values)), torch.tensor(mean))


def test_a_mean_of_another_dtype_is_refused():
    with pytest.raises(InputError, match="float64"):
        exact_mean(torch.zeros(3).double())


def test_a_fraction_of_items_has_its_own_count():
    """The count is that of the values given: 5 of 12 items are divided by 5."""
    values = torch.arange(12.0)
    assert_same_bits(exact_mean(values[:5]), torch.tensor(2.0))
