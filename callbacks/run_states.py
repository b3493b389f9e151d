"""The named tensors of a run by kind, and their digests with one wait for the device."""

from collections.abc import Iterable, Mapping

import torch

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import kernels_of
from det_lightning.ledger.digest import digest_of_lanes, tensor_digest


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
    """name -> tensor digest (16 bytes), now."""
    return StartedDigests(tensors).result()


class StartedDigests:
    """Digests that were asked for and may still be under way: what lies on a CUDA device is digested there, in the order
    of its stream, and fetched in one copy; later changes of the tensors are not seen. CPU tensors are digested at once.

    Raises InputError for a tensor that this rank does not hold whole.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._ready: dict[str, bytes] = {}
        self._waiting: list[tuple[list[tuple[str, torch.dtype, torch.Size]], Fetched]] = []
        on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if type(tensor).__name__ == "DTensor":
                raise InputError(
                    f"{name} is sharded (DTensor): a ledger records tensors that a rank holds whole; record with kinds=() "
                    f"or compare checkpoints"
                )
            if tensor.is_cuda:
                on_device.setdefault(tensor.device, {})[name] = tensor
            else:
                self._ready[name] = tensor_digest(tensor.detach())
        for group in on_device.values():
            lanes = torch.stack([kernels_of("digest").lanes_tensor(tensor) for tensor in group.values()])
            kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in group.items()]
            self._waiting.append((kinds, Fetched(lanes)))

    def result(self) -> dict[str, bytes]:
        """name -> tensor digest; waits for the device if need be."""
        for kinds, fetched in self._waiting:
            for (name, dtype, shape), (first, second) in zip(kinds, fetched.tensor().tolist(), strict=True):
                self._ready[name] = digest_of_lanes(dtype, shape, first, second)
        self._waiting = []
        return self._ready


class Fetched:
    """A tensor on its way to the CPU."""

    def __init__(self, tensor: torch.Tensor):
        tensor = tensor.detach()
        self._event = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor
