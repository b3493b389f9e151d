"""The second line of defence: every step of a loss's backward pass is one whose arithmetic is covered.

What a function mode cannot see shows here: TorchScript, private functions, backward passes of the user's own.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from det_lightning.errors import UncoveredError

_OWN_FUNCTIONS = f"{__name__.partition('.')[0]}.ops."
# Steps that torch adds for the calls that layers/function_mode.py lets pass with a gradient.
_COVERED_STEPS = frozenset(
    """AccumulateGrad Add Sub Rsub Mul Div Neg View UnsafeView ReshapeAlias Alias AsStrided Permute Transpose T Squeeze
    Unsqueeze Select Slice Split SplitWithSizes UnsafeSplit Unbind Cat Stack Clone Copy ToCopy CopySlices CopyBackwards
    Index Where MaskedFill""".split()
)


def steps_below(nodes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(step, next step) for every edge of the graph from these autograd nodes to its leaves; each step once."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                yield node, below
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)


def name_of(node: Any) -> str:
    """Add of torch's AddBackward0."""
    name = node.name().rpartition("::")[2]
    return name if name in _COVERED_STEPS else re.sub(r"Backward\d*$", "", name)


def check_step(node: Any) -> None:
    """Raises UncoveredError unless the step is covered."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None and name_of(node) not in _COVERED_STEPS:
        raise UncoveredError(
            f"the loss goes through {node.name()}, a step without an arithmetic contract that was made where calls cannot "
            f"be seen: TorchScript, torch.compile or a private function. Write it with covered operations."
        )
    if function is not None and not function.__module__.startswith(_OWN_FUNCTIONS):
        raise UncoveredError(
            f"{function.__module__}.{function.__qualname__} is an autograd function with a backward pass of its own, which "
            f"has no arithmetic contract. Write it with covered operations."
        )
