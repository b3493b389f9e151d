"""The mean over chosen items, and quotients of exact sums whose gradient waits for its division."""

import pytest
import torch

from det_lightning.errors import InputError
from det_lightning.layers.loss_calls import count_digits
from det_lightning.ops.loss import exact_mean as mean_of_all
from det_lightning.ops.means import exact_mean, item_digits, quotient_of, undivided
from tests.ops.exact_oracle import INF, NAN, wide_values
from tests.same_bits import assert_same_bits


def test_a_mask_chooses_the_items_and_what_it_leaves_out_reaches_nothing():
    values, mask = wide_values(1, 6, 5), torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) > 0.5
    values[~mask] = NAN
    values.requires_grad_()
    mean = exact_mean(values, mask)
    assert_same_bits(mean.detach(), mean_of_all(values.detach()[mask]))
    mean.backward()
    share = torch.tensor(1.0) / torch.tensor(float(mask.sum()))
    assert_same_bits(values.grad, torch.where(mask, share, torch.tensor(0.0)))
    assert_same_bits(exact_mean(values.detach(), torch.zeros_like(mask)), torch.tensor(NAN))
    assert_same_bits(exact_mean(values.detach()[mask]), mean.detach())


def test_quotients_of_exact_sums():
    values = wide_values(2, 9).requires_grad_()
    result = undivided(values, item_digits(values), count_digits(9))
    assert_same_bits(result.detach(), mean_of_all(values.detach()))
    result.backward(torch.tensor(3.0))
    assert_same_bits(values.grad, torch.full((9,), 3.0))
    weights = torch.tensor([0.1, 0.7, 3.0])
    assert_same_bits(quotient_of(item_digits(weights), item_digits(weights)), torch.tensor(1.0))
    assert_same_bits(quotient_of(count_digits(2), item_digits(torch.tensor([INF]))), torch.tensor(NAN))
    assert_same_bits(quotient_of(count_digits(0), count_digits(0)), torch.tensor(NAN))
    assert_same_bits(quotient_of(count_digits(2**40), count_digits(1)), torch.tensor(2.0**40))


@pytest.mark.parametrize("mask", [torch.ones(3), torch.ones(2, dtype=torch.bool)])
def test_a_mask_of_another_kind_is_refused_with_the_line_to_write(mask):
    with pytest.raises(InputError, match=r"mask\.bool\(\)\.expand_as\(values\)"):
        exact_mean(torch.zeros(3), mask)
