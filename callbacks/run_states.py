"""The named tensors of a run by kind."""

from collections.abc import Iterable

import torch
from det_lightning.callbacks.shards import logical_name


def named_states(
    module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, dict[str, torch.Tensor]]:
    """kind -> name -> tensor, of weights, buffers, optimizer state, and gradients where there are any; of sharded ones what
    this rank holds."""
    parameters = {logical_name(name): parameter for name, parameter in module.named_parameters()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        "weights": parameters,
        "buffers": {logical_name(name): buffer for name, buffer in module.named_buffers()},
        "gradients": {name: each.grad for name, each in parameters.items() if each.grad is not None},
        "optimizer": {
            f"{names.get(id(parameter), 'unnamed')}.{key}": value
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    }
