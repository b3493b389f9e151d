"""The named tensors of a run by kind, and their digests with one wait for the device."""

from collections.abc import Iterable, Mapping

import torch

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import kernels_of
from det_lightning.ledger.digest import digest_of_lanes, tensor_digest
from det_lightning.ledger.record import KINDS


def named_states(
    module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, dict[str, torch.Tensor]]:
    """kind -> name -> tensor, of weights, buffers, optimizer state, and gradients where there are any."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "weights": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "gradients": {name: each.grad for name, each in module.named_parameters() if each.grad is not None},
        "optimizer": {
            f"{names.get(id(parameter), 'unnamed')}.{key}": value
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    }


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """name -> tensor digest (16 bytes). What lies on a CUDA device is digested there and fetched in one copy."""
    found = {}
    waiting: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or type(tensor).__name__ == "DTensor":
            raise InputError(
                f"{name} is a {type(tensor).__name__}: a ledger records tensors that a rank holds whole. Under sharding "
                f"strategies record with kinds=() or compare checkpoints instead"
            )
        if tensor.is_cuda:
            waiting.setdefault(tensor.device, {})[name] = tensor
        else:
            found[name] = tensor_digest(tensor.detach())
    for group in waiting.values():
        lanes = torch.stack([kernels_of("digest").lanes_tensor(tensor) for tensor in group.values()]).cpu().tolist()
        for (name, tensor), (first, second) in zip(group.items(), lanes, strict=True):
            found[name] = digest_of_lanes(tensor, first, second)
    return found


def schedule_of(kinds: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """kind -> every how many steps it is recorded. Raises InputError for an unknown kind or an interval below 1."""
    every = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1)
    unknown = sorted(set(every) - set(KINDS))
    if unknown:
        raise InputError(f"a ledger records {', '.join(KINDS)}; it does not know {', '.join(unknown)}")
    for kind, steps in every.items():
        if type(steps) is not int or steps < 1:
            raise InputError(f"{kind} is to be recorded every {steps!r} steps; give a whole number from 1")
    return every
