"""Flips a chosen bit of a chosen weight after a chosen step: a drill for `bisect` and for guards against corruption."""

import torch
from det_lightning.callbacks.lightning_namespace import Callback

from det_lightning.errors import InputError


class FaultInjector(Callback):
    """Flips one bit once; place it before the WeightLedger that is to notice.

    Args:
        step: the optimizer step after which the bit is flipped, from 1.
        parameter: name of a float32 parameter.
        index: flat index of the element in row-major order.
        bit: 0 (lowest bit of the significand) to 31 (sign).
        rank: the only rank on which it is flipped; None for all.

    Raises:
        InputError: at the start of training, if there is no such place.
    """

    def __init__(self, step: int, parameter: str, index: int, bit: int, *, rank: int | None = None):
        super().__init__()
        self.step, self.parameter, self.index, self.bit, self.rank = step, parameter, index, bit, rank
        self._done = False

    def on_train_start(self, trainer, pl_module) -> None:
        parameters = dict(pl_module.named_parameters())
        target = parameters.get(self.parameter)
        if target is None:
            raise InputError(f"there is no parameter {self.parameter!r}; the model has {', '.join(parameters)}")
        if target.dtype != torch.float32 or not 0 <= self.index < target.numel() or not 0 <= self.bit < 32:
            raise InputError(
                f"{self.parameter} is {target.dtype} with {target.numel()} elements: there is no bit {self.bit} of "
                f"element {self.index} to flip"
            )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self._done or trainer.global_step != self.step:
            return
        self._done = True
        if self.rank is not None and trainer.global_rank != self.rank:
            return
        target = dict(pl_module.named_parameters())[self.parameter]
        mask = (1 << self.bit) - (1 << 32 if self.bit == 31 else 0)
        with torch.no_grad():
            words = target.detach().contiguous().view(torch.int32).flatten()
            words[self.index] ^= mask
            target.copy_(words.view(torch.float32).view_as(target))
