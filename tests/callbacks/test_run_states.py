"""Every tensor of a run has a name of its own."""

import pytest
import torch
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.shards import Shards, logical_name

from det_lightning.errors import InputError


def stepped(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_states_of_parameters_that_are_not_the_modules_are_told_apart():
    module, others = torch.nn.Linear(3, 2), [torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 4)]
    parameters = [*module.parameters(), *others]
    optimizer = stepped(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), parameters)
    states = named_states(module, [optimizer])["optimizer"]
    assert {name: tuple(each.shape) for name, each in states.items()} == {
        "weight.momentum_buffer": (2, 3),
        "bias.momentum_buffer": (2,),
        "unnamed-0-2.momentum_buffer": (2,),
        "unnamed-0-3.momentum_buffer": (3,),
        "unnamed-0-4.momentum_buffer": (4,),
    }


def test_two_optimizers_of_one_parameter_keep_two_states():
    module = torch.nn.Linear(3, 2, bias=False)
    pair = [stepped(torch.optim.SGD(module.parameters(), lr=r, momentum=0.9), module.parameters()) for r in (0.1, 0.2)]
    states = named_states(module, pair)["optimizer"]
    assert set(states) == {"weight.momentum_buffer", "optimizer-1.weight.momentum_buffer"}
    assert states["weight.momentum_buffer"] is pair[0].state[module.weight]["momentum_buffer"]


def test_names_of_wrappers_are_left_out():
    assert logical_name("net._fsdp_wrapped_module.first._checkpoint_wrapped_module.weight") == "net.first.weight"


def test_partitioned_parameters_of_deepspeed_are_refused():
    module = torch.nn.Linear(3, 2)
    module.weight.ds_id = 0
    with pytest.raises(InputError, match="DeepSpeed has partitioned weight"):
        Shards.of(module)
