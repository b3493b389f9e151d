"""Records digests of everything a training computes, at every optimizer step, in a ledger directory."""

import os
import time
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch
from blake3 import blake3
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.run_header import entry_of, environment, recipe

from det_lightning.errors import InputError
from det_lightning.ledger.digest import tensor_digest
from det_lightning.ledger.record import KINDS, float_bits
from det_lightning.ledger.store import LedgerWriter


class WeightLedger(Callback):
    """Writes a ledger of the run into a directory; rank 0 writes, training is not changed by a bit.

    Args:
        path: the ledger's directory. A fresh run needs one that holds no ledger; a run resumed from a checkpoint
            continues the ledger there, or begins a new one that says what it continues.
        entry: "package.module:function" that returns (LightningModule, DataLoader or LightningDataModule): how
            `det-lightning replay` builds the run again.
        entry_arguments: keyword arguments of that function; numbers, strings, lists and dicts.
        kinds: which tensors get a digest each: of "weights", "gradients" (reduced, before clipping), "optimizer",
            "buffers".

    Raises:
        InputError: an unknown kind.
        LedgerError: at the start of a fit, if the directory holds another run's ledger.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        entry: str | None = None,
        entry_arguments: dict[str, Any] | None = None,
        kinds: tuple[str, ...] = KINDS,
    ):
        super().__init__()
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise InputError(f"WeightLedger records {', '.join(KINDS)}; it does not know {', '.join(unknown)}")
        self.path = Path(path)
        self._entry = entry, entry_arguments
        self._kinds = tuple(kinds)
        self._writer: LedgerWriter | None = None
        self._state: dict[str, Any] = {}  # step and trace of the last record, for checkpoints
        self._step = 0
        self._gradients: dict[str, bytes] = {}
        self._rates: list[str] = []

    @property
    def state_key(self) -> str:
        return "WeightLedger"  # not the path: a replay continues the trace of a checkpoint in a directory of its own

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = dict(state)

    def setup(self, trainer, pl_module, stage: str) -> None:
        if stage == "fit" and hasattr(trainer.strategy, "record_samples"):
            trainer.strategy.record_samples = True

    def on_train_start(self, trainer, pl_module) -> None:
        self._step = trainer.global_step
        if trainer.is_global_zero:
            self._writer = self._open(trainer, pl_module)
            if self._writer.step is None:
                self._append(trainer, pl_module, loss=None)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self._writer is None:
            return
        self._rates = [float_bits(float(group["lr"])) for group in optimizer.param_groups]
        if "gradients" in self._kinds:
            self._gradients = {
                name: tensor_digest(parameter.grad)
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._writer is not None:
            self._note_checkpoints(trainer)
            facts = getattr(trainer.strategy, "step_facts", None)
            loss = facts.loss if facts is not None else outputs["loss"] if isinstance(outputs, dict) else outputs
            self._append(trainer, pl_module, loss=loss)

    def on_train_end(self, trainer, pl_module) -> None:
        if self._writer is not None:
            self._note_checkpoints(trainer)
            self._writer.close()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        """After an exception the ledger stays open-ended: it does not say that the run was finished."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _open(self, trainer, pl_module) -> LedgerWriter:
        here = environment(trainer)
        # Of this run only: the callback may have recorded another one before.
        state = self._state if self._state.get("step") == trainer.global_step else {}
        if state and (self.path / "ledger.jsonl").exists():
            writer = LedgerWriter.reopen(self.path, environment=here, **state)
            if writer.torn_bytes or writer.torn_leaf_bytes:
                warn(
                    f"the ledger {self.path} ended within a record, as after a kill: {writer.torn_bytes} bytes of a torn "
                    f"line and {writer.torn_leaf_bytes} bytes of leaves were cut off",
                    stacklevel=2,
                )
            return writer
        return LedgerWriter.create(
            self.path,
            recipe=recipe(trainer, pl_module),
            environment=here,
            entry=entry_of(trainer, *self._entry),
            resumed_from=state or None,
        )

    def _append(self, trainer, pl_module, *, loss: torch.Tensor | None) -> None:
        strategy, first = trainer.strategy, loss is None
        facts = None if first else getattr(strategy, "step_facts", None)
        clip = None if first else getattr(trainer.precision_plugin, "clip", None)
        agree = {
            "step": self._step,
            "epoch": facts.slice.epoch if facts is not None else trainer.current_epoch,
            "sample_ids": None if facts is None else _ids_digest(strategy.training_data.order, facts.slice),
            "sample_bytes": None if facts is None or facts.sample_digest is None else f"{facts.sample_digest:016x}",
            "loss": None if loss is None else float_bits(loss.detach()),
            "learning_rates": [] if first else self._rates,
            "clip": None if clip is None else {"norm": float_bits(clip[0]), "coefficient": float_bits(clip[1])},
        }
        record = self._writer.append(agree, self._leaves(trainer, pl_module), {"time_ns": time.time_ns()})
        self._state = {"step": record.step, "trace": record.trace}
        self._gradients = {}

    def _leaves(self, trainer, pl_module) -> dict[str, dict[str, bytes]]:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        tensors: dict[str, dict[str, torch.Tensor]] = {
            "weights": dict(pl_module.named_parameters()),
            "buffers": dict(pl_module.named_buffers()),
            "optimizer": {
                f"{names.get(id(parameter), 'unnamed')}.{key}": value
                for optimizer in trainer.optimizers
                for parameter, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            },
        }
        leaves = {
            kind: {name: tensor_digest(tensor.detach()) for name, tensor in named.items()}
            for kind, named in tensors.items()
            if kind in self._kinds
        }
        if "gradients" in self._kinds:
            leaves["gradients"] = self._gradients
        return leaves

    def _note_checkpoints(self, trainer) -> None:
        saved = getattr(trainer.strategy, "saved_checkpoints", [])
        while saved:
            step, path = saved.pop(0)
            if os.path.isfile(path):
                self._writer.checkpoint(step, path, _file_digest(path))


def _ids_digest(order: Any, here: Any) -> str:
    """BLAKE3 of the data set indices of a step in their global order, as little-endian int64."""
    return blake3(order.step(here.epoch, here.step).astype(np.dtype("<i8")).tobytes()).hexdigest()


def _file_digest(path: str) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()
