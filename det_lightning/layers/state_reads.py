"""Which of a model's tensors the first micro-batch of a step uses as they were when it began: one that it changes afterwards
is another tensor to the micro-batches that follow.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from det_lightning.layers.batch_free_functions import in_place
from det_lightning.layers.call_names import flat

# The elements leave for Python.
_EXITS = frozenset(
    "item tolist numpy array float int bool index complex format repr str equal allclose is_nonzero".split()
)
# Shape, dtype and device of an operand count, and not its elements.
_LOOKS = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like data requires_grad_".split()
)


class StateReads:
    """The calls of one micro-batch that use given tensors, told by their memory.

    Args:
        named: (name, tensor), as they are when it begins.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]):
        self._names: dict[int | None, list[str]] = {}
        for name, tensor in named:
            self._names.setdefault(_memory(tensor), []).append(name)
        self._names.pop(None, None)
        self._before: set[str] = set()  # used before they were written
        self._used: set[int] = set()  # memory of the operands, of those tensors as soon as they were written
        self._written: set[int] = set()

    def follow(self, name: str, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor], result: Any) -> None:
        """A call was made."""
        if name in _LOOKS or name.startswith("new_"):
            return
        made = {_memory(value) for value in flat(result) if isinstance(value, Tensor)}
        changes = name == "setitem" or in_place(func)
        uses = made or changes or name in _EXITS
        for place, value in enumerate(operands):
            memory = _memory(value)
            if changes and place == 0:
                self._written.add(memory)
            elif memory is not None and memory not in made and uses:  # a view uses nothing yet
                if memory in self._written or memory not in self._names:
                    self._used.add(memory)
                else:
                    self._before.update(self._names[memory])

    def spoiled(self, changed: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the tensors that were used and then changed, and not used again: of (name, tensor) that differ at the
        end from what they were. What is used before and afterwards is taken for a value that was made from the old one."""
        return [name for name, tensor in changed if name in self._before and _memory(tensor) not in self._used]


def _memory(tensor: Tensor) -> int | None:
    """Where its elements lie; None where they do not lie in one piece of memory, or there are none."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and tensor.numel()
    return tensor.untyped_storage().data_ptr() if dense else None
