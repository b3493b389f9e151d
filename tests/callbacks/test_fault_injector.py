"""The planted fault: exactly one bit, exactly once, and a place that does not exist is refused."""

import numpy as np
import pytest
import torch
from det_lightning.callbacks.fault_injector import FaultInjector

from det_lightning.errors import InputError


class _Trainer:
    global_step = 2


def test_one_bit_of_one_element_is_flipped_once():
    module = torch.nn.Linear(4, 3)
    before = module.weight.detach().numpy().copy().view(np.uint32)
    for bit in (0, 22, 30, 31):
        injector = FaultInjector(2, "weight", 7, bit)
        injector.on_train_start(_Trainer, module)
        for _ in range(2):
            injector.on_train_batch_end(_Trainer, module, None, None, 0)
        difference = before ^ module.weight.detach().numpy().view(np.uint32)
        assert difference.flatten().tolist() == [0] * 7 + [1 << bit] + [0] * 4
        FaultInjector(2, "weight", 7, bit).on_train_batch_end(_Trainer, module, None, None, 0)


def test_nothing_happens_at_other_steps():
    module = torch.nn.Linear(4, 3)
    before = module.weight.detach().numpy().tobytes()
    FaultInjector(3, "weight", 0, 0).on_train_batch_end(_Trainer, module, None, None, 0)
    assert module.weight.detach().numpy().tobytes() == before


@pytest.mark.parametrize("place", [("nothing", 0, 0), ("weight", 12, 0), ("weight", -1, 0), ("bias", 0, 32)])
def test_a_place_that_does_not_exist_is_refused(place):
    with pytest.raises(InputError):
        FaultInjector(1, *place).on_train_start(_Trainer, torch.nn.Linear(4, 3))
