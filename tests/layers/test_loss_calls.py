"""Calls of stock losses whose arguments do not fit, with the argument named and the line to write."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import InputError, UncoveredError
from det_lightning.layers.loss_calls import loss_call
from det_lightning.ops.means import exact_mean, item_digits, quotient_of
from tests.ops.exact_oracle import from_patterns, rounded
from tests.same_bits import assert_same_bits


def called(func, *args, **kwargs):
    return loss_call(func, args, kwargs, 4, UncoveredError)


ROWS, CLASSES, ELSEWHERE = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.device("meta")
DEVICES = {
    "cross_entropy target": lambda: called(F.cross_entropy, ROWS, CLASSES.to(ELSEWHERE)),
    "cross_entropy weight": lambda: called(F.cross_entropy, ROWS, CLASSES, weight=torch.ones(3, device=ELSEWHERE)),
    "nll_loss weight": lambda: called(F.nll_loss, ROWS, CLASSES, torch.ones(3, device=ELSEWHERE)),
    "mse_loss target": lambda: called(F.mse_loss, ROWS, ROWS.to(ELSEWHERE)),
    "binary_cross_entropy weight": lambda: called(F.binary_cross_entropy, ROWS, ROWS, weight=ROWS.to(ELSEWHERE)),
    "binary_cross_entropy_with_logits pos_weight": lambda: called(
        F.binary_cross_entropy_with_logits, ROWS, ROWS, pos_weight=torch.ones(3, device=ELSEWHERE)
    ),
}


@pytest.mark.parametrize("name", DEVICES)
def test_tensors_on_two_devices_are_refused_with_the_argument_and_both_devices(name):
    function, argument = name.split()
    with pytest.raises(InputError, match=rf"{function} .* input on cpu and {argument} on meta\. Move {argument}"):
        DEVICES[name]()


def test_a_mask_on_another_device_is_refused_with_the_line_to_write():
    with pytest.raises(InputError, match=r"on cpu and mask on meta\. Write exact_mean\(values, mask\.to\("):
        exact_mean(torch.zeros(3), torch.ones(3, dtype=torch.bool, device=ELSEWHERE))


def test_a_mean_with_item_weights_divides_by_what_torch_divides_by():
    """mse_loss and l1_loss by the sum of the weights, the others by the number of items."""
    generator = torch.Generator().manual_seed(1)
    x, y, weight = (torch.rand(4, 3, generator=generator) for _ in range(3))
    for func in (F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits):
        items = called(func, x, y, weight=weight)
        mean = quotient_of(item_digits(items.values), items.denominator)
        assert mean.item() == pytest.approx(func(x, y, weight=weight).item(), rel=1e-6)
        divided_by_weights = func in (F.mse_loss, F.l1_loss)
        divisor = sum(map(Fraction, weight.flatten().tolist())) if divided_by_weights else items.values.numel()
        exact = rounded(items.values.flatten().tolist(), torch.float32, divisor)
        assert_same_bits(mean, from_patterns([exact], (), torch.float32))
        assert (items.key[0] == "weights") == divided_by_weights
        assert called(func, x, y, weight=weight, reduction="sum").key[0] == "items"
    assert called(F.mse_loss, x.bfloat16(), y, weight=weight.bfloat16()).values.dtype is torch.float32


@pytest.mark.parametrize("weight", [torch.ones(3), -torch.ones(4, 3)])
def test_weights_that_cannot_be_divided_by_are_refused(weight):
    with pytest.raises(InputError, match=r"shape|not negative"):
        called(F.mse_loss, ROWS, ROWS, weight=weight)
