"""Recognises a stock optimizer by its exact type and steps it by our sequence."""

from collections.abc import Callable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from det_lightning.errors import UncoveredError
from det_lightning.optim.adam import adam_step
from det_lightning.optim.sgd import sgd_step

STEPS: dict[type[Optimizer], Callable[[Optimizer], None]] = {SGD: sgd_step, Adam: adam_step, AdamW: adam_step}


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises UncoveredError unless every step of this optimizer has a contract."""
    kind = type(optimizer)
    if kind not in STEPS:
        known = ", ".join(sorted(f"{cls.__module__.rpartition('.')[0]}.{cls.__name__}" for cls in STEPS))
        raise UncoveredError(
            f"the optimizer {kind.__module__}.{kind.__name__} has no sequence of rounded operations under "
            f'strategy="det". Covered, by exact type: {known}. Use one of them in configure_optimizers.'
        )
    for group in optimizer.param_groups:
        flags = [name for name in ("fused", "differentiable", "capturable") if group.get(name)]
        if flags:
            raise UncoveredError(
                f"{kind.__name__}({flags[0]}=True) asks for a kernel with roundings of its own; leave {flags[0]} out."
            )
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise UncoveredError(
                    f"{kind.__name__} holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; "
                    f"float32 is covered. Keep the model in float32 (Trainer(precision='32-true'))."
                )


def step_optimizer(optimizer: Optimizer) -> None:
    """Runs one step, with the optimizer's own step hooks around it and its schedulers told."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    STEPS[type(optimizer)](optimizer)
    optimizer._opt_called = True  # what lr schedulers look at to see that step() came before theirs
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})
