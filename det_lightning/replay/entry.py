"""How a run is built again: a function that returns the LightningModule, its data and, if need be, callbacks."""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from det_lightning.errors import InputError
from det_lightning.ledger.record import bits_float, with_floats

_HERE = Path(__file__).resolve().parents[1]
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Built:
    """A run that can be trained: what an entry returned.

    callbacks: those that change the training, such as one that keeps an average of the weights.
    """

    module: Any
    data: Any
    callbacks: tuple[Any, ...] = ()


def build(entry: dict[str, Any], override: str | None = None) -> Built:
    """The run of a ledger's entry, or of `override`: "package.module:function", or the file of a LightningCLI config. An
    override is called without arguments, unless it is the recorded function.

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
    if name.endswith(CONFIG_SUFFIXES):
        return _from_config(Path(name))
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if override is None:
        _refuse_foreign_code(name, module_name)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"the entry {name!r} cannot be imported from {os.getcwd()}: {error}. It is written package.module:function"
        ) from error
    if entry.get("seed") is not None:
        seed_everything(entry["seed"], workers=bool(entry.get("seed_workers")), verbose=False)
    same = override in (None, entry.get("function"))
    result = function(**(with_floats(entry.get("arguments", {})) if same else {}))
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not hasattr(result[0], "training_step"):
        raise InputError(
            f"the entry {name!r} returned {type(result).__name__}; it returns (LightningModule, DataLoader or "
            f"LightningDataModule), and as a third item a list of the callbacks that change the training, if there are any"
        )
    return Built(result[0], result[1], tuple(result[2]) if len(result) == 3 else ())


def _refuse_foreign_code(name: str, module_name: str) -> None:
    """A ledger may come from anybody, and an entry is called: what it names must lie in the working directory, so that
    no file makes this process call, say, os.system."""
    top = module_name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # importing it says what is wrong
    if spec is None:
        return
    places = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or [])]
    # What is built in or frozen has a word in place of a path.
    if not places or not all(os.path.isabs(place) and _is_local(Path(place).resolve()) for place in places):
        raise InputError(
            f"the ledger names the entry {name!r}, whose code ({places[0] if places else 'built in'}) does not lie in "
            f"{Path.cwd()}. A replay calls that function: if it is the run's, give it yourself, with --entry {name}"
        )


def _is_local(place: Path) -> bool:
    """In the working directory, but not installed there; or this package, for its demonstration."""
    installed = {"site-packages", "dist-packages"} & set(place.parts)
    return (place.is_relative_to(Path.cwd().resolve()) and not installed) or place.is_relative_to(_HERE)


def _from_config(path: Path) -> Built:
    """The model and the data of a LightningCLI config, which must name their classes (class_path)."""
    from lightning.pytorch.cli import LightningCLI

    if not path.is_file():
        raise InputError(f"the LightningCLI config {path} does not exist in {os.getcwd()}")
    try:
        cli = LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            save_config_callback=None,
            args=["--config", str(path)],
            trainer_defaults={"logger": False, "enable_checkpointing": False},
        )
    except SystemExit:
        raise InputError(f"LightningCLI does not accept the config {path}; what is wrong stands above") from None
    return Built(cli.model, cli.datamodule)


def trainer_arguments(entry: dict[str, Any]) -> dict[str, Any]:
    """The recorded Trainer arguments that belong to the recipe, without limits on the length."""
    recorded = entry.get("trainer", {})
    clip = recorded.get("gradient_clip_val")
    return {
        "gradient_clip_val": None if clip is None else bits_float(clip),
        "gradient_clip_algorithm": recorded.get("gradient_clip_algorithm"),
    }
