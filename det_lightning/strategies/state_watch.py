"""Looks at what the micro-batches of one step do to the state they run on, weights, buffers and learning rates: what moves
once for each micro-batch makes the training depend on how many of them a step has.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_lightning.distributed.replicas import lanes_of
from det_lightning.errors import UncoveredError
from det_lightning.kernels.dispatch import unrecorded
from det_lightning.layers.state_reads import StateReads

_ONCE = (
    "so that it depends on how the global batch is cut into micro-batches. Change it once a step, for example in "
    "on_before_optimizer_step, in optimizer_step after super().optimizer_step(...), or, in a loop of your own, after "
    "optimizer.step()."
)


class StateWatch:
    """The state during the micro-batches of one step; a step of one micro-batch is not looked at.

    It is compared by digests, since a write through `.data` moves no version counter.

    Attributes:
        reads: to be told of the calls of the micro-batch; None where they do not matter.
    """

    reads: StateReads | None = None

    def __init__(self):
        self._watching = False
        self._now: dict[str, Any] = {}
        self._left: dict[str, Any] = {}

    def begin(self, module: nn.Module, optimizers: Iterable[Optimizer], *, number: int, of: int) -> None:
        """Micro-batch `number` (the first is 0) begins. Raises UncoveredError if something changed since the one before."""
        self._watching, self.reads = of > 1, None
        if not self._watching:
            return
        now = dict(_state(module, optimizers))
        if number == 0:
            self._left, self.reads = {}, StateReads(_named_tensors(module))
        else:
            self._refuse(
                _unlike(self._now, now),
                "between two micro-batches of one step (on_train_batch_end, for one, runs after each of them)",
            )
        self._now = now

    def end(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Its loss is there. Raises UncoveredError if it left a thing unlike an earlier micro-batch that changed it too."""
        if not self._watching:
            return
        before, self._now = self._now, dict(_state(module, optimizers))
        changed = _unlike(before, self._now)
        self._refuse(
            [name for name in changed if name in self._left and self._left[name] != self._now.get(name)],
            "by two micro-batches of one step, to unlike values",
        )
        self._left |= {name: self._now.get(name) for name in changed}
        reads, self.reads = self.reads, None
        if reads is not None and changed:
            self._refuse(
                reads.spoiled((name, tensor) for name, tensor in _named_tensors(module) if name in changed),
                "by a micro-batch that had used it (those that follow in its step would use another value)",
            )

    @staticmethod
    def _refuse(names: list[str], how: str) -> None:
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UncoveredError(f"the {names[0]}{others} was changed {how}, {_ONCE}")


def _state(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """(what it is called, something that is equal while it stays the same)."""
    tensors = _named_tensors(module)
    dense = [each for each in tensors if _is_dense(each[1])]
    lanes = lanes_of(dense)
    yield from ((name, (tensor.dtype, tensor.shape, lanes[name])) for name, tensor in dense)
    yield from ((name, (id(tensor), tensor._version)) for name, tensor in tensors if not _is_dense(tensor))
    for optimizer in optimizers:
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    with unrecorded():
                        number = value.tolist() if isinstance(value, Tensor) else value
                    yield f"{name} of {type(optimizer).__name__}'s parameter group {place}", number


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = [(f"parameter {name}", tensor) for name, tensor in module.named_parameters()]
    return parameters + [(f"buffer {name}", tensor) for name, tensor in module.named_buffers()]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _unlike(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
