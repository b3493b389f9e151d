"""Calls of stock losses whose arguments do not fit, with the argument named and the line to write."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import InputError, UncoveredError
from det_lightning.layers.loss_calls import loss_call
from det_lightning.ops.means import exact_mean


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
