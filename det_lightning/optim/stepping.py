"""Recognises a stock optimizer by its exact type and steps it by our sequence."""

from collections.abc import Callable

import torch
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from det_lightning.errors import UncoveredError
from det_lightning.optim.adam import adam_step
from det_lightning.optim.muon import muon_step
from det_lightning.optim.one_thread import one_thread
from det_lightning.optim.sgd import sgd_step

STEPS: dict[type[Optimizer], Callable[[Optimizer], None]] = {
    SGD: sgd_step,
    Adam: adam_step,
    AdamW: adam_step,
    Muon: muon_step,
}
LOST_CLAIM = (
    "the optimizer {name} steps with torch's own kernels: the same bits for every world size, micro-batch size and "
    "accumulation on one kind of machine, but not on CPU and CUDA, nor on another processor or version of torch"
)


def check_optimizer(optimizer: Optimizer, *, as_it_is: bool = False) -> str | None:
    """Looks at an optimizer before it steps.

    Args:
        as_it_is: take an optimizer without a sequence of ours, which then steps by itself.

    Returns:
        None, or for an optimizer taken as it is the claim that is lost.

    Raises:
        UncoveredError: an optimizer, an option of it or a dtype without a contract.
    """
    kind = type(optimizer)
    if kind not in STEPS:
        name = f"{kind.__module__}.{kind.__name__}"
        if kind.__name__ == "LBFGS":
            raise UncoveredError(
                f"the optimizer {name} has no sequence of rounded operations: it runs the closure many times in a step. Use "
                f"one of {_known()}."
            )
        if hasattr(optimizer, "consolidate_state_dict"):
            raise UncoveredError(
                f'the optimizer {name} cuts its state over the ranks. Under strategy="det" every rank holds whole optimizer '
                f"state, so that ledger and checkpoints do not depend on the world size. Use one of {_known()}."
            )
        if as_it_is:
            return LOST_CLAIM.format(name=name)
        raise UncoveredError(
            f'the optimizer {name} has no sequence of rounded operations under strategy="det". Covered, by exact type: '
            f"{_known()}. Use one of them in configure_optimizers, or DetStrategy(stock_optimizers=True) to step it as "
            f"it is: then CPU and CUDA no longer give the same bits."
        )
    for group in optimizer.param_groups:
        flags = [name for name in ("fused", "differentiable", "capturable") if group.get(name)]
        if flags:
            raise UncoveredError(
                f"{kind.__name__}({flags[0]}=True) asks for a kernel with roundings of its own; leave {flags[0]} out."
            )
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise UncoveredError(
                    f"{kind.__name__} holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; float32 and "
                    f"bfloat16 are covered. Use Trainer(precision='32-true') or precision='bf16-true'."
                )
    return None


def step_optimizer(optimizer: Optimizer) -> None:
    """Runs one step, with the optimizer's own step hooks around it and its schedulers told.

    An optimizer without a sequence of ours (see `check_optimizer`) makes its own step, on one thread.
    """
    if type(optimizer) not in STEPS:
        with one_thread():
            optimizer.step()
        return
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    STEPS[type(optimizer)](optimizer)
    optimizer._opt_called = True  # what lr schedulers look at to see that step() came before theirs
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def _known() -> str:
    return ", ".join(sorted(f"torch.optim.{cls.__name__}" for cls in STEPS))
