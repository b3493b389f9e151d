"""The hooks between a loaded batch and training_step: those that transform it run under the function mode, the others may
not change it, since what they compute on a micro-batch would not be seen.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from det_lightning.distributed.random_guard import no_draws
from det_lightning.errors import UncoveredError


class BatchMarks:
    """What a batch was made of when it arrived on the device."""

    def __init__(self):
        self._marks: list[tuple[int, int]] = []

    def note(self, batch: Any) -> None:
        self._marks = _marks_of(batch)

    def check(self, batch: Any) -> None:
        """Raises UncoveredError if a tensor was replaced, or changed in place, since."""
        if _marks_of(batch) != self._marks:
            raise UncoveredError(
                "a tensor of the batch was changed in on_train_batch_start, where calls are not seen. Change batches in "
                "on_before_batch_transfer or on_after_batch_transfer with covered operations, or in the data set."
            )


def _marks_of(batch: Any) -> list[tuple[int, int]]:
    return [(id(leaf), leaf._version) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def cover_before_transfer(module: torch.nn.Module, mode: Callable[[], AbstractContextManager]) -> None:
    """Lets on_before_batch_transfer run under a mode while the Trainer trains; undone by `uncover_before_transfer`."""
    inner = module._on_before_batch_transfer

    def covered(batch: Any, dataloader_idx: int = 0) -> Any:
        if not module.trainer.training:
            return inner(batch, dataloader_idx)
        with no_draws("in on_before_batch_transfer"), mode():
            return inner(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = covered


def uncover_before_transfer(module: torch.nn.Module) -> None:
    module.__dict__.pop("_on_before_batch_transfer", None)
