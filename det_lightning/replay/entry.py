"""How a run is built again: a function that returns the LightningModule and its data."""

import importlib
import os
import sys
from typing import Any

from det_lightning.errors import InputError
from det_lightning.ledger.record import bits_float


def build(entry: dict[str, Any], override: str | None = None) -> tuple[Any, Any]:
    """(module, DataLoader or LightningDataModule) from a ledger's entry, or from `override` ("package.module:function").

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
    result = function(**({} if override else entry.get("arguments", {})))
    if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[0], "training_step"):
        raise InputError(
            f"the entry {name!r} returned {type(result).__name__}; it returns (LightningModule, DataLoader or "
            f"LightningDataModule)"
        )
    return result


def trainer_arguments(entry: dict[str, Any]) -> dict[str, Any]:
    """The recorded Trainer arguments that belong to the recipe, without limits on the length."""
    recorded = entry.get("trainer", {})
    clip = recorded.get("gradient_clip_val")
    return {
        "gradient_clip_val": None if clip is None else bits_float(clip),
        "gradient_clip_algorithm": recorded.get("gradient_clip_algorithm"),
    }
