"""Hooks of a module and of other callbacks that may run between two looks of a guard, and may change what it looks at."""

from collections.abc import Iterable
from typing import Any

import torch
from det_lightning.callbacks.lightning_namespace import Callback

_LIGHTNING = ("lightning.", "pytorch_lightning.")
# Of Lightning's own callbacks, those that change a model, or run code of their user.
_CHANGING = (
    "EMAWeightAveraging",
    "LambdaCallback",
    "ModelPruning",
    "StochasticWeightAveraging",
    "WeightAveraging",
)


def foreign_hooks(
    trainer: Any,
    pl_module: torch.nn.Module,
    guard: Callback,
    *,
    of_module: Iterable[str] = (),
    ahead: Iterable[str] = (),
    behind: Iterable[str] = (),
) -> list[str]:
    """ "Class.hook" for each hook that is not empty: of the module, of callbacks that stand before `guard` in the Trainer's
    list, and of those that stand behind it. This package's own callbacks and most of Lightning's change nothing."""
    place = trainer.callbacks.index(guard)
    found = [(pl_module, hook) for hook in of_module if not _is_from(getattr(type(pl_module), hook), _LIGHTNING)]
    for callbacks, hooks in ((trainer.callbacks[:place], ahead), (trainer.callbacks[place + 1 :], behind)):
        for callback in callbacks:
            if not _is_harmless(callback):
                found += [
                    (callback, hook) for hook in hooks if getattr(type(callback), hook) is not getattr(Callback, hook)
                ]
    return [f"{type(owner).__name__}.{hook}" for owner, hook in found]


def _is_harmless(callback: Callback) -> bool:
    kind = type(callback)
    return kind.__module__.startswith("det_lightning.") or (
        kind.__module__.startswith(_LIGHTNING) and kind.__name__ not in _CHANGING
    )


def _is_from(function: Any, packages: tuple[str, ...]) -> bool:
    return function.__module__.startswith(packages)
