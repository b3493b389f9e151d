"""How a run is built again: a function that returns the LightningModule, its data and, if need be, callbacks."""

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import seed_everything

from det_lightning.errors import InputError
from det_lightning.ledger.record import bits_float, with_floats


@dataclass(frozen=True)
class Built:
    """A run that can be trained: what an entry returned.

    callbacks: those that change the training, such as one that keeps an average of the weights.
    """

    module: Any
    data: Any
    callbacks: tuple[Any, ...] = ()


def build(entry: dict[str, Any], override: str | None = None) -> Built:
    """The run of a ledger's entry, or of `override` ("package.module:function"), called without
    arguments.

    Raises:
        InputError: there is no entry, it cannot be imported, or it returns something else. What the function itself
            raises passes through.
    """
    name = override or entry.get("function")
    if not name:
        raise InputError(
            "the ledger does not say how to build its run again. Give --entry package.module:function, or record with "
            "WeightLedger(path, entry='package.module:function')"
        )
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"the entry {name!r} cannot be imported from {os.getcwd()}: {error}. It is written package.module:function"
        ) from error
    if entry.get("seed") is not None:
        seed_everything(entry["seed"], workers=bool(entry.get("seed_workers")), verbose=False)
    result = function(**({} if override else with_floats(entry.get("arguments", {}))))
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not hasattr(result[0], "training_step"):
        raise InputError(
            f"the entry {name!r} returned {type(result).__name__}; it returns (LightningModule, DataLoader or "
            f"LightningDataModule), and as a third item a list of the callbacks that change the training, if there are any"
        )
    return Built(result[0], result[1], tuple(result[2]) if len(result) == 3 else ())


def trainer_arguments(entry: dict[str, Any]) -> dict[str, Any]:
    """The recorded Trainer arguments that belong to the recipe, without limits on the length."""
    recorded = entry.get("trainer", {})
    clip = recorded.get("gradient_clip_val")
    return {
        "gradient_clip_val": None if clip is None else bits_float(clip),
        "gradient_clip_algorithm": recorded.get("gradient_clip_algorithm"),
    }
