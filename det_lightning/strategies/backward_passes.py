"""The backward passes of one micro-batch's loss: one for each number that its means divide by. They leave digits in the
reducer, and a gradient nowhere.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.errors import UncoveredError
from det_lightning.layers.loss_plan import LossPlan


def add_loss(plan: LossPlan, reducer: GradientReducer) -> None:
    """Adds the values of a loss to those of the step."""
    parts = [MeanPart(mean.digits, mean.denominator, mean.total) for mean in plan.means]
    reducer.add_loss(parts, plan.groups, plan.structure, plan.pattern)


def backward_passes(
    plan: LossPlan,
    reducer: GradientReducer,
    parameters: Iterable[tuple[str, nn.Parameter]],
    backward: Callable[[Tensor, dict[str, Any]], None],
    *,
    last: bool,
) -> None:
    """Runs them.

    Args:
        parameters: of the model, by name; their `.grad` is None.
        backward: of a tensor, with further keyword arguments.
        last: it is the step's last micro-batch.

    Raises:
        UncoveredError: a parameter received a gradient past the reducer.
    """
    for group in range(len(plan.groups)):
        reducer.begin(group, last=last)
        backward(plan.partial(group), {"retain_graph": True} if group + 1 < len(plan.groups) else {})
        reducer.end()
    for name, parameter in parameters:
        if parameter.grad is not None:
            raise UncoveredError(
                f"the parameter {name} received a gradient that was already summed and rounded over the "
                f"micro-batch. Use it through nn.Linear or F.linear, or freeze it (requires_grad_(False))."
            )
