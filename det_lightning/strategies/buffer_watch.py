"""Looks at what training_step does to buffers: a counter in one would move once for each micro-batch, so that the training
would depend on how many of them a step has.
"""

import torch
from torch import Tensor, nn

from det_lightning.errors import UncoveredError


class BufferWatch:
    """The buffers of a model during the micro-batches of one step."""

    def __init__(self):
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._left: dict[str, Tensor] = {}

    def begin(self, module: nn.Module, *, first: bool) -> None:
        """A micro-batch begins, the `first` one of its step or another."""
        self._before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        if first:
            self._left = {}

    def end(self, module: nn.Module) -> None:
        """Its loss is there. Raises UncoveredError if it left a buffer unlike the micro-batch before that changed it too."""
        for name, buffer in module.named_buffers():
            before, version = self._before.get(name, (None, 0))
            if before is buffer and version == buffer._version:
                continue
            if name in self._left and not _same_bits(self._left[name], buffer):
                raise UncoveredError(
                    f"the buffer {name} was changed by two micro-batches of one step, to unlike values, so that it depends "
                    f"on how the global batch is cut into micro-batches. Change it once a step, for example in "
                    f"on_before_optimizer_step or, in a loop of your own, after optimizer.step()."
                )
            self._left[name] = buffer.detach().clone()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))
