"""How a run is built again: a function that returns the LightningModule, its data and, if need be, callbacks."""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import callbacks, seed_everything

from det_lightning.errors import InputError
from det_lightning.ledger.lines import LEDGER_FILE
from det_lightning.ledger.record import with_floats

_PACKAGE = Path(__file__).resolve().parents[1]
_DEMO = _PACKAGE / "demo" / "network"
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
    if not all(isinstance(entry.get(name) or {}, dict) for name in ("arguments", "trainer")):
        raise InputError("the ledger's entry is not sound: its arguments and those of its Trainer are not named values")
    name = override or entry.get("function")
    if not name:
        raise InputError(
            "the ledger does not say how to build its run again. Give --entry package.module:function, or record with "
            "WeightLedger(path, entry='package.module:function')"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where the entry's modules lie, and those of the classes that a config names
    if name.endswith(CONFIG_SUFFIXES):
        return _from_config(Path(name), recorded=override is None)
    module_name, _, function_name = name.partition(":")
    if override is None:
        _refuse_foreign_code(name, module_name)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"the entry {name!r} cannot be imported from {os.getcwd()}: {error}. It is written package.module:function"
        ) from error
    if not callable(function):
        raise InputError(f"the entry {name!r} is a {type(function).__name__}, not a function that builds the run")
    if override is None:  # the module may have imported it from anywhere
        _refuse_foreign_code(name, getattr(function, "__module__", None) or "builtins")
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
    top, *inside = module_name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # importing it says what is wrong
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        places = [spec.origin or "built in"]  # what is built in or frozen has a word in place of a path
    else:
        folders = [os.path.dirname(spec.origin)] if spec.origin else spec.submodule_search_locations
        places = [os.path.join(each, *inside) for each in folders]
    foreign = next((each for each in places if not os.path.isabs(each) or not _is_local(Path(each))), None)
    if foreign is not None or not places:
        _refuse_foreign(name, foreign or "nowhere")


def _refuse_foreign(name: str, place: str | Path) -> NoReturn:
    raise InputError(
        f"the ledger names the entry {name!r}, whose code ({place}) does not lie in {Path.cwd()} or lies in a ledger. A "
        f"replay runs it: if it is the run's, give it yourself, with --entry {name}"
    )


def _is_local(place: Path) -> bool:
    """In the working directory, but neither installed there nor in a ledger, which may have brought it along. Of this
    package its demonstration only: other functions write where their arguments say."""
    place, here = place.resolve(), Path.cwd().resolve()
    if place.is_relative_to(_PACKAGE):
        return place == _DEMO
    if not place.is_relative_to(here) or {"site-packages", "dist-packages"} & set(place.parts):
        return False
    below = [each for each in (place, *place.parents) if each != here and each.is_relative_to(here)]
    return not any(os.path.lexists(each / LEDGER_FILE) for each in below)


def _from_config(path: Path, *, recorded: bool) -> Built:
    """The model, the data and the callbacks of a LightningCLI config, which must name their classes (class_path)."""
    from lightning.pytorch.cli import LightningCLI

    if not os.path.isfile(path):
        raise InputError(f"the LightningCLI config {path} does not exist in {os.getcwd()}")
    if recorded and not _is_local(path):
        _refuse_foreign(str(path), path.absolute())
    try:
        cli = LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            save_config_callback=None,
            args=["--config", str(path)],
            trainer_defaults={"logger": False},
        )
    except SystemExit:
        raise InputError(f"LightningCLI does not accept the config {path}; what is wrong stands above") from None
    return Built(cli.model, cli.datamodule, tuple(each for each in cli.trainer.callbacks if not _only_watches(each)))


def _only_watches(callback: Any) -> bool:
    """Whether it is known to leave the training as it is, or belongs to what a replay has of its own."""
    own = any(each.__module__.startswith("det_lightning.") for each in type(callback).__mro__)
    return own or isinstance(
        callback,
        (
            callbacks.Checkpoint,
            callbacks.DeviceStatsMonitor,
            callbacks.EarlyStopping,
            callbacks.GradientAccumulationScheduler,
            callbacks.LearningRateMonitor,
            callbacks.ModelSummary,
            callbacks.ProgressBar,
            callbacks.ThroughputMonitor,
            callbacks.Timer,
        ),
    )
