"""What every training begins with: one state on all ranks, in a process that keeps subnormal numbers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import UncoveredError

_WHOLE = (
    'Under strategy="det" every rank holds whole parameters and whole optimizer state; nothing is sharded. Leave it out, or '
    "train with the strategy it belongs to."
)


def broadcast_state(module: nn.Module) -> None:
    """Every rank starts from rank 0's parameters and buffers, as under ddp."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            _broadcast(tensor.detach())


def _broadcast(tensor: Tensor) -> None:
    """The first rank's values on every rank; as bytes, which every backend moves."""
    whole = tensor.contiguous()
    with other_ranks("rank 0's state was sent to every rank"):
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    tensor.copy_(whole)


def check_whole(module: nn.Module) -> None:
    """Raises UncoveredError if parameters are cut over ranks, or a wrapper inside the model reduces gradients itself."""
    for path, child in module.named_modules():
        if type(child).__module__.startswith(("torch.distributed.", "torch.nn.parallel.")):
            raise UncoveredError(
                f"the module {path or '(the model itself)'} is a {type(child).__name__}, which cuts parameters or reduces "
                f"gradients by itself. {_WHOLE}"
            )
    for name, parameter in module.named_parameters():
        if type(parameter.data).__module__.startswith("torch.distributed."):
            kind = type(parameter.data).__name__
            raise UncoveredError(f"the parameter {name} is cut over ranks (a {kind}). {_WHOLE}")


def refuse_compiled(what: str) -> UncoveredError:
    """The error for a compiled model."""
    return UncoveredError(
        f"{what} was compiled. torch.compile fuses operations into kernels with roundings of their own, which "
        f'strategy="det" cannot see: train the model without torch.compile.'
    )


def check_not_compiled(module: nn.Module) -> None:
    """Raises UncoveredError if the model, one of its methods, or a module in it was compiled."""
    if getattr(module, "_compiler_ctx", None) is not None:  # Lightning's note of a compiled LightningModule
        raise refuse_compiled(f"the model {type(module).__name__}")
    for path, child in module.named_modules():
        if type(child).__name__ == "OptimizedModule" or child._compiled_call_impl is not None:
            raise refuse_compiled(f"the module {path}" if path else f"the model {type(child).__name__}")


def check_subnormals() -> None:
    """A library that switches flush-to-zero on would change results without a trace."""
    tiny = torch.full((1 << 16,), 2.0**-149)
    if not bool((tiny * 1.0 == tiny).all()):
        raise UncoveredError(
            "this process flushes subnormal numbers to zero, so results would depend on which library was imported "
            "first. Call torch.set_flush_denormal(False), or find the library built with -ffast-math."
        )
