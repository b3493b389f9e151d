"""The backward passes of one micro-batch's loss: one for each number that its means divide by. They leave digits in the
reducer, and a gradient nowhere. What the steps of Trainer and of Fabric share.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from det_lightning.distributed.reducer import GradientReducer, MeanPart
from det_lightning.errors import UncoveredError
from det_lightning.layers.loss_plan import LossPlan
from det_lightning.layers.loss_terms import MOST_MEANS


def reducer_of_step(
    before: GradientReducer | None, named: list[tuple[str, nn.Parameter]], **options: bool
) -> GradientReducer:
    """The reducer of a step that begins: the one before, or a new one where other parameters take part now.

    Args:
        named: the parameters that take part.
        options: of a new reducer, `announced` and `frozen_too`.
    """
    if before is not None:
        before.forget_functions()
        if [id(p) for _, p in named] == [id(p) for _, p in before.parameters]:
            return before
    return GradientReducer(named, means=MOST_MEANS, **options)


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
                f"micro-batch. Let it meet samples through nn.Linear, F.linear, x @ weight, + - * / or "
                f"parameter.expand(len(x), ...), or freeze it (requires_grad_(False))."
            )


def check_trainable(model: nn.Module, reducer: GradientReducer) -> None:
    """Raises UncoveredError unless the parameters that take part in the step still do: of one that is frozen midway a part
    of the sum would be missing."""
    began, now = reducer.own_parameters, [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if [id(p) for _, p in began] == [id(p) for _, p in now]:
        return
    changed = {name for name, _ in began} ^ {name for name, _ in now}
    names = ", ".join(sorted(changed)) or "(replaced)"
    raise UncoveredError(
        f"the parameters {names} were frozen or unfrozen between two micro-batches of one optimizer step, so their "
        f"gradients would be parts of the sum over the global batch. Change them between two steps, for example in "
        f"on_train_epoch_start."
    )
