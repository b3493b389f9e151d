"""Follows the ledger of a past run live: stops or warns at the first difference, and keeps what the step was made of."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import torch
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.weight_ledger import WeightLedger

from det_lightning.errors import DivergenceError, InputError
from det_lightning.ledger.compare import Difference, difference_at, header_differences
from det_lightning.ledger.explanation import explanation
from det_lightning.ledger.store import LedgerReader

_ACTIONS = ("stop", "warn", "raise")


class LedgerGuard(Callback):
    """Compares every record that a WeightLedger of the same Trainer writes with the reference's record of that step.

    Args:
        reference: directory of the reference run's ledger.
        action: at the first difference "stop" ends the training after this step, "warn" goes on, "raise" raises on
            every rank.
        dump: directory for the tensors, the batch and the difference of that step (of several micro-batches the last
            one of each rank); None for none.

    Attributes:
        difference: the first one, None as long as there is none; on rank 0.

    Raises:
        DivergenceError: with action "raise".
        InputError: an unknown action, or no WeightLedger before it in the list of callbacks.
        LedgerError: the reference cannot be read.
    """

    def __init__(
        self,
        reference: str | os.PathLike,
        *,
        action: Literal["stop", "warn", "raise"] = "stop",
        dump: str | os.PathLike | None = None,
    ):
        super().__init__()
        if action not in _ACTIONS:
            raise InputError(f"action is {action!r}; allowed: {', '.join(_ACTIONS)}")
        self.reference, self.action = Path(reference), action
        self.dump = None if dump is None else Path(dump)
        self.difference: Difference | None = None
        self._ledger: WeightLedger | None = None
        self._reader: LedgerReader | None = None
        self._step, self._done = 0, False

    def on_train_start(self, trainer, pl_module) -> None:
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        ledgers = [each for each in before if isinstance(each, WeightLedger)]
        if not ledgers:
            raise InputError(
                "LedgerGuard reads what a WeightLedger records; place one before it in the list of callbacks"
            )
        self._ledger, self._step, self._done, self.difference = ledgers[0], trainer.global_step, False, None
        if trainer.is_global_zero:
            self._reader = LedgerReader(self.reference)
            self._tell_header()
        self._compare(trainer, pl_module, None)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step or self._done:
            return
        self._step = trainer.global_step
        self._compare(trainer, pl_module, batch)

    def teardown(self, trainer, pl_module, stage: str) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _tell_header(self) -> None:
        with LedgerReader(self._ledger.path) as own:
            found = [each for each in header_differences(self._reader, own) if each.part == "recipe"]
        if found:
            names = ", ".join(each.name for each in found[:5])
            warn(
                f"LedgerGuard: the recipe is not that of {self.reference} ({names}): a difference is expected",
                stacklevel=2,
            )

    def _compare(self, trainer, pl_module, batch: Any) -> None:
        if trainer.is_global_zero:
            self.difference = self._difference()
        differs = trainer.strategy.reduce_boolean_decision(self.difference is not None, all=False)
        if not differs:
            return
        self._done = True
        if self.dump is not None:
            self._write_dump(trainer, pl_module, batch)
        message = f"the run leaves the ledger {self.reference} at step {self._step}"
        if self.difference is not None:
            message += f": {_what(self.difference)}"
            for logger in trainer.loggers:
                logger.log_metrics({"ledger/first_divergent_step": float(self._step)}, self._step)
        if self.action == "raise":
            raise DivergenceError(message, step=self._step)
        if trainer.is_global_zero:
            warn(message, stacklevel=2)
        if self.action == "stop":
            trainer.should_stop = True

    def _difference(self) -> Difference | None:
        """Of the newest record; None where it agrees, or where the reference has none of this step."""
        reader, step = self._reader, self._step
        if reader.first_step is None or not reader.first_step <= step <= reader.last_step:
            return None
        if reader.record(step).trace == self._ledger.state_dict().get("trace"):
            return None
        with LedgerReader(self._ledger.path) as own:
            last_match = step - 1 if _agree(reader, own, step - 1) else None
            found = difference_at(reader, own, step, last_match=last_match)
        return found if found.found else None

    def _write_dump(self, trainer, pl_module, batch: Any) -> None:
        folder = self.dump / f"step-{self._step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(batch, folder / f"batch-rank-{trainer.global_rank}.pt")
        if not trainer.is_global_zero:
            return
        states = named_states(pl_module, trainer.optimizers)
        differing = {(each.kind, each.name) for each in self.difference.tensors}
        kept = {
            f"{kind} {name}": getattr(tensor, "_local_tensor", tensor).detach().cpu()  # of a DTensor this rank's part
            for kind, named in states.items()
            for name, tensor in named.items()
            if not differing or (kind, name) in differing
        }
        torch.save(kept, folder / "tensors.pt")
        told = asdict(self.difference) | {"explanation": explanation(self.difference)}
        (folder / "difference.json").write_text(json.dumps(told, indent=2, ensure_ascii=False), encoding="utf-8")


def _agree(reference: LedgerReader, own: LedgerReader, step: int) -> bool:
    """Whether both have a record of `step`, and one history up to it."""
    held = all(each.first_step is not None and each.first_step <= step for each in (reference, own))
    return held and reference.record(step).trace == own.record(step).trace


def _what(difference: Difference) -> str:
    names = [each.name for each in (*difference.fields, *difference.roots) if not each.one_sided]
    tensors = [f"{each.kind} {each.name}" for each in difference.tensors]
    told = f"{', '.join(names)} differ{'s' if len(names) == 1 else ''}"
    if tensors:
        told += f", first {tensors[0]}" + (f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else "")
    meaning = explanation(difference)
    return f"{told}; {meaning}" if meaning else told
