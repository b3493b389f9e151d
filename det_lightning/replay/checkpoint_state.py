"""The state in a Lightning checkpoint, of any strategy, as digests; nothing in the file is ever executed."""

import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from det_lightning.errors import DetError, LedgerError
from det_lightning.ledger.digest import tensor_digest
from det_lightning.ledger.line_file import open_regular

STATE_DICT, OPTIMIZER = "state_dict", "optimizer"
SUFFIXES = (".ckpt",)
_MOST_REPEATED_BYTES = 1 << 30  # of a tensor that has more elements than its file stores, as an expanded one


@dataclass(frozen=True)
class SavedState:
    """What a run was after `step` steps.

    Attributes:
        tensors: kind (STATE_DICT, OPTIMIZER) -> name -> digest in hex.
        settings: name -> text, of what is no tensor: hyperparameters of optimizers and schedulers.
        unnamed_optimizer: the optimizer's tensors have places instead of names, as in a checkpoint.
    """

    step: int
    tensors: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, str] = field(default_factory=dict)
    unnamed_optimizer: bool = True


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's content, on the CPU.

    Raises:
        LedgerError: it cannot be read, is no Lightning checkpoint, or holds objects that only code could rebuild.
    """
    open_regular(path).close()  # names a pipe, a device or a missing file before torch waits for it
    _refuse_compressed(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, on formats that are refused or digested right here
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise LedgerError(_unreadable(path, error)) from None
    step = content.get("global_step") if isinstance(content, dict) else None
    if (
        not isinstance(step, int)
        or isinstance(step, bool)
        or step < 0
        or not isinstance(content.get("state_dict"), dict)
    ):
        raise LedgerError(f"{path} is no Lightning checkpoint: it has no global_step or no state_dict")
    return content


@lru_cache(maxsize=64)
def read_state(path: Path) -> SavedState:
    """The digests of a checkpoint. Raises LedgerError as `load_checkpoint` does."""
    content = load_checkpoint(path)
    try:
        tensors = {
            STATE_DICT: {
                name: _digest(value)
                for name, value in content["state_dict"].items()
                if isinstance(name, str) and isinstance(value, torch.Tensor)
            },
            OPTIMIZER: dict(_optimizer_tensors(content.get("optimizer_states") or [])),
        }
        settings = dict(_settings(content))
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError, DetError) as error:
        raise LedgerError(f"{path} is no sound Lightning checkpoint ({_first_line(error)})") from None
    return SavedState(content["global_step"], tensors, settings)


def _digest(tensor: torch.Tensor) -> str:
    size = tensor.numel() * tensor.element_size()
    if (
        size > _MOST_REPEATED_BYTES
        and tensor.layout is torch.strided
        and size > (stored := tensor.untyped_storage().nbytes())
    ):
        raise LedgerError(f"a tensor of {size} bytes of which {stored} are stored")
    return tensor_digest(tensor).hex()


def _refuse_compressed(path: Path) -> None:
    """torch.save compresses nothing, so what would unpack to more than the file holds was not written by it."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(each.file_size for each in archive.infolist())
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile):
        return  # the older format of torch.save, or torch says what is wrong
    if size > path.stat().st_size:
        raise LedgerError(
            f"the checkpoint {path} would unpack to {size} bytes, more than it has: it is compressed, which torch.save "
            f"never does"
        )


def _unreadable(path: Path, error: Exception) -> str:
    """What torch.load says, without its advice to run the code in the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    foreign = next((line[line.index("GLOBAL ") :].partition(". ")[0] for line in lines if "GLOBAL " in line), None)
    if foreign is not None:
        return (
            f"the checkpoint {path} cannot be read without running code from it ({foreign[:200]}). What holds such "
            f"objects is mostly hyper_parameters: save_hyperparameters(ignore=...) keeps them out"
        )
    why = next((line for line in lines if line.startswith("Unsupported")), None)
    return f"the checkpoint {path} is cut, damaged or none at all ({why[:200] if why else _first_line(error)})"


def _optimizer_tensors(states: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for number, state in enumerate(states):
        for place, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {number}, parameter {place}, {key}", _digest(value)


def _settings(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for number, state in enumerate(content.get("optimizer_states") or []):
        for group_number, group in enumerate(state["param_groups"]):
            for key, value in group.items():
                if key != "params":
                    yield f"optimizer {number}, group {group_number}, {key}", str(value)
    for number, state in enumerate(content.get("lr_schedulers") or []):
        for key, value in state.items():
            yield f"scheduler {number}, {key}", str(value)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
