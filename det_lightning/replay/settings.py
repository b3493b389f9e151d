"""What a replay gives its Trainer and its process again, as the ledger's header recorded it. A header may come from anybody:
what is not of the expected type is left out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from det_lightning.callbacks.trainer_settings import DDP_OPTIONS
from det_lightning.errors import LedgerError
from det_lightning.ledger.record import bits_float

_MOST_THREADS = 1024
_PRECISIONS = ("highest", "high", "medium")


def trainer_arguments(
    entry: Mapping[str, Any], recipe: Mapping[str, Any], recorded: tuple[int, int] | None, split: tuple[int, int]
) -> dict[str, Any]:
    """The recorded Trainer arguments that belong to the recipe, without limits on the length.

    recorded, split: (world size, accumulation) of the run, None if it is not known, and of the replay. Numbers of batches
    are converted; where that cannot be, the replay does not validate.
    """
    given = {name: _number(value) for name, value in entry.get("trainer", {}).items()}
    given["gradient_clip_algorithm"] = entry.get("trainer", {}).get("gradient_clip_algorithm")
    clip = entry.get("trainer", {}).get("gradient_clip_val")
    if clip is None and "trainer" not in entry:  # an entry that was not recorded; the recipe has it too
        clip, algorithm = (recipe.get("clip") or {}).get("value"), (recipe.get("clip") or {}).get("algorithm")
        given["gradient_clip_algorithm"] = None if algorithm == "None" else algorithm
    arguments = {
        "gradient_clip_val": None if clip is None else bits_float(clip),
        "gradient_clip_algorithm": given.get("gradient_clip_algorithm"),
        **_validation(given, recorded, split),
    }
    if type(given.get("reload_dataloaders_every_n_epochs")) is int:
        arguments["reload_dataloaders_every_n_epochs"] = given["reload_dataloaders_every_n_epochs"]
    if recipe.get("arithmetic") == "det":
        steps = (recipe.get("data") or {}).get("steps_per_epoch")
        if type(steps) is int:
            name = (
                "overfit_batches" if _is_number(given.get("overfit_batches"), at_least=1e-9) else "limit_train_batches"
            )
            arguments[name] = steps * split[1]
        return arguments
    for name in ("overfit_batches", "limit_train_batches"):
        if _is_number(given.get(name)):
            arguments[name] = given[name]
    for name in ("use_distributed_sampler", "sync_batchnorm"):
        if isinstance(given.get(name), bool):
            arguments[name] = given[name]
    return arguments


def ddp_options(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded options of DistributedDataParallel that move bits or decide whether a model can be trained."""
    options = entry.get("trainer", {}).get("ddp")
    options = options if isinstance(options, dict) else {}
    numbers = {name: _number(value) for name, value in options.items() if name in DDP_OPTIONS}
    return {name: value for name, value in numbers.items() if value is not None}


def recorded_threads(recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """How many threads each process of the run used, where its bits depend on them; None: no matter."""
    threads = environment.get("threads")
    sound = type(threads) is int and 1 <= threads <= _MOST_THREADS
    return threads if sound and recipe.get("arithmetic") != "det" else None


@contextmanager
def as_recorded(recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[None]:
    """Within the block threads and switches of torch are as the run observed them; afterwards as they were."""
    flags = environment.get("flags")
    flags = flags if isinstance(flags, dict) else {}
    threads = recorded_threads(recipe, environment)
    dtype = getattr(torch, str(flags.get("default_dtype")).removeprefix("torch."), None)
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(flags.get("deterministic_algorithms"), bool):
            # A run that only warned did not end here either; the kernels are the same.
            torch.use_deterministic_algorithms(flags["deterministic_algorithms"], warn_only=True)
        if flags.get("float32_matmul_precision") in _PRECISIONS:
            torch.set_float32_matmul_precision(flags["float32_matmul_precision"])
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        torch.set_float32_matmul_precision(before[3])
        torch.set_default_dtype(before[4])


def _validation(given: Mapping[str, Any], recorded: tuple[int, int] | None, split: tuple[int, int]) -> dict[str, Any]:
    none = {"limit_val_batches": 0}
    limit, interval, every = (
        given.get(name) for name in ("limit_val_batches", "val_check_interval", "check_val_every_n_epoch")
    )
    if (
        recorded is None
        or not _is_number(limit)
        or not _is_number(interval, at_least=1e-9)
        or type(every) not in (int, type(None))
    ):
        return none
    if type(limit) is int:  # of each rank's batches
        limit, left = divmod(limit * recorded[0], split[0])
        if left:
            return none
    if type(interval) is int:
        interval, left = divmod(interval * split[1], recorded[1])
        if left:
            return none
    return {
        "limit_val_batches": limit,
        "val_check_interval": interval,
        "check_val_every_n_epoch": every,
        "num_sanity_val_steps": 0,
    }


def _is_number(value: Any, *, at_least: float = 0) -> bool:
    return type(value) in (int, float) and at_least <= value < 1 << 31


def _number(value: Any) -> Any:
    """A number of a header, None for anything else."""
    if isinstance(value, str):
        try:
            return bits_float(value)
        except LedgerError:
            return None
    return value if isinstance(value, bool | int) else None
