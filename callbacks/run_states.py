"""The named tensors of a run by kind."""

from collections.abc import Iterable, Mapping

import torch
from det_lightning.callbacks.shards import logical_name


def named_states(
    module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, dict[str, torch.Tensor]]:
    """kind -> name -> tensor, of weights, buffers, optimizer state, and gradients where there are any; of sharded ones what
    this rank holds."""
    parameters = {logical_name(name): parameter for name, parameter in module.named_parameters()}
    return {
        "weights": parameters,
        "buffers": {logical_name(name): buffer for name, buffer in module.named_buffers()},
        "gradients": {name: each.grad for name, each in parameters.items() if each.grad is not None},
        "optimizer": _optimizer_states(parameters, optimizers),
    }


def _optimizer_states(
    parameters: Mapping[str, torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Every tensor once: a parameter that is not the module's is named by its place, and another optimizer of a parameter by
    its number."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, torch.Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        places = {id(each): place for place, each in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), f"unnamed-{number}-{places.get(id(parameter), 'other')}")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    full = f"{name}.{key}"
                    found[full if full not in found else f"optimizer-{number}.{full}"] = value
    return found
