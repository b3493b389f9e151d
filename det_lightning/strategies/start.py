"""What every training begins with: one state on all ranks, in a process that keeps subnormal numbers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from det_lightning.errors import UncoveredError


def broadcast_state(module: nn.Module) -> None:
    """Every rank starts from rank 0's parameters and buffers, as under ddp."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            _broadcast(tensor.detach())


def _broadcast(tensor: Tensor) -> None:
    """The first rank's values on every rank; through a contiguous copy of a format that every backend moves."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sent = (whole.to(torch.uint8) if whole.dtype is torch.bool else whole).contiguous()
    dist.broadcast(sent, src=0)
    whole.copy_(sent)


def check_subnormals() -> None:
    """A library that switches flush-to-zero on would change results without a trace."""
    tiny = torch.full((1 << 16,), 2.0**-149)
    if not bool((tiny * 1.0 == tiny).all()):
        raise UncoveredError(
            "this process flushes subnormal numbers to zero, so results would depend on which library was imported "
            "first. Call torch.set_flush_denormal(False), or find the library built with -ffast-math."
        )
