"""Records digests of everything a training computes, at every optimizer step, in a ledger directory."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch
from blake3 import blake3
from det_lightning.callbacks.lightning_namespace import Callback
from det_lightning.callbacks.recording import recording_options
from det_lightning.callbacks.resumed_state import STATES, unlike_record
from det_lightning.callbacks.run_header import entry_of, environment, recipe
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import Fetched, StartedDigests
from det_lightning.callbacks.trainer_settings import trainer_settings

from det_lightning.kernels.dispatch import unrecorded
from det_lightning.ledger.lines import LEDGER_FILE
from det_lightning.ledger.reader import UNLIKE_RECORD
from det_lightning.ledger.record import KINDS, float_bits, root
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
            "buffers". A mapping says every how many steps: {"weights": 1, "optimizer": 100}.
        leaves_every_n_steps: single digests are kept at these steps only, and of the others the roots; so much smaller is
            the ledger of a long run. A difference then leads to a tensor by a replay.
        keep_leaves: of so many of the last records single digests are kept, older ones are deleted from time to time, so
            that the ledger grows by its lines only; None: all are kept.
        keep_leaves_every_n_steps: those of these steps are kept for good nevertheless.
        log: hand trace and roots to the Trainer's loggers too, as numbers in [0, 1), every `log_every_n_steps`: two runs
            whose curves coincide are the same.

    Raises:
        InputError: an unknown kind, an interval below 1, or options that contradict each other.
        LedgerError: at the start of a fit, if the directory holds another run's ledger.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        entry: str | None = None,
        entry_arguments: dict[str, Any] | None = None,
        kinds: Iterable[str] | Mapping[str, int] = KINDS,
        leaves_every_n_steps: int = 1,
        keep_leaves: int | None = None,
        keep_leaves_every_n_steps: int | None = None,
        log: bool = True,
    ):
        super().__init__()
        self._options = recording_options(kinds, leaves_every_n_steps, keep_leaves, keep_leaves_every_n_steps)
        self.path, self._log = Path(path).absolute(), log
        self._entry = entry, entry_arguments
        self._settings: dict[str, Any] = {}  # of the Trainer, before its loaders are made
        self._writer: LedgerWriter | None = None
        self._state: dict[str, Any] = {}  # step and trace of the last record, for checkpoints
        self._step = 0
        self._gradients = StartedDigests({})
        self._pending: Callable[[], None] | None = None  # writes the record whose digests are still under way
        self._rates: list[str] = []
        self._facts: Any = None  # what the strategy says of the step that is about to be made
        self._shards: Shards | None = None  # given if the ranks hold parts of tensors, which they then digest together

    @property
    def state_key(self) -> str:
        return "WeightLedger"  # not the path: a replay continues the trace of a checkpoint in a directory of its own

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = dict(state)

    def flush(self) -> None:
        """Writes the last record now. On a CUDA device it otherwise waits for the end of the next step, so that the device
        never does."""
        write, self._pending = self._pending, None
        if write is not None:
            write()

    def setup(self, trainer, pl_module, stage: str) -> None:
        if stage != "fit":
            return
        self._settings = trainer_settings(trainer)
        if hasattr(trainer.strategy, "record_samples"):
            trainer.strategy.record_samples = True

    def on_train_start(self, trainer, pl_module) -> None:
        self._step = trainer.global_step
        self._shards = Shards.of(getattr(trainer.strategy, "model", None) or pl_module)
        # Of this run only: the callback may have recorded another one before.
        state = self._state if self._state.get("step") == trainer.global_step else {}
        goes_on = trainer.is_global_zero and bool(state) and (self.path / LEDGER_FILE).exists()
        started: dict[str, StartedDigests] = {}
        if trainer.strategy.broadcast(goes_on) if self._shards is not None else goes_on:
            states = named_states(pl_module, trainer.optimizers)
            due = set(self._options.due(self._step))
            started = {kind: self._digests(kind, states[kind]) for kind in STATES if kind in due}
        if trainer.is_global_zero:
            self._writer = self._open(trainer, pl_module, state, started if goes_on else None)
        first = self._writer is not None and self._writer.step is None
        if self._shards is not None:
            first = trainer.strategy.broadcast(first)
        if first:
            self._record(trainer, pl_module, first=True)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self._record_finished_step(trainer, pl_module, None)  # of another optimizer within this batch
        if not self._takes_part:
            return
        self._facts = getattr(trainer.strategy, "step_facts", None)
        self._rates = [float_bits(float(group["lr"])) for group in optimizer.param_groups]
        if self._options.is_due("gradients", trainer.global_step + 1):
            self._gradients = self._digests("gradients", named_states(pl_module, [])["gradients"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._record_finished_step(trainer, pl_module, outputs)

    def _record_finished_step(self, trainer, pl_module, outputs: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._takes_part:
            self.flush()
            self._note_checkpoints(trainer)
            self._record(trainer, pl_module, loss=outputs.get("loss") if isinstance(outputs, dict) else outputs)

    def on_train_end(self, trainer, pl_module) -> None:
        if self._writer is not None:
            self.flush()
            self._note_checkpoints(trainer)
            self._writer.close()

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self._end()

    def on_exception(self, trainer, pl_module, exception: BaseException) -> None:
        """The ledger stays open-ended: it does not say that the run was finished."""
        self._end()

    def _end(self) -> None:
        self._shards = None
        if self._writer is not None:
            try:
                self.flush()
            finally:
                self._writer.abandon()
                self._writer = self._pending = None

    def _open(self, trainer, pl_module, state, started: Mapping[str, StartedDigests] | None) -> LedgerWriter:
        """started: digests of the state that the run goes on with in this ledger; None: it begins one."""
        here = environment(trainer) | {"recording": self._options.header()}
        if started is not None:
            if unlike := unlike_record(self.path, state["step"], started):
                here[UNLIKE_RECORD] = unlike
            writer = LedgerWriter.reopen(self.path, environment=here, retention=self._options.retention, **state)
            if writer.torn_bytes or writer.torn_leaf_bytes:
                warn(
                    f"the ledger {self.path} ended within a record, as after a kill: {writer.torn_bytes} bytes of a torn "
                    f"line and {writer.torn_leaf_bytes} bytes of leaves were cut off",
                    stacklevel=2,
                )
            if unlike:
                warn(
                    f"the run goes on after step {state['step']} with another state than {self.path} recorded there "
                    f"({', '.join(unlike[:5])}{', ...' if len(unlike) > 5 else ''}): the checkpoint is damaged, or code "
                    f"changed the state after the record or since",
                    stacklevel=2,
                )
            return writer
        return LedgerWriter.create(
            self.path,
            recipe=recipe(trainer, pl_module, self._shards),
            environment=here,
            entry=entry_of(*self._entry, self._settings),
            resumed_from=state or None,
            retention=self._options.retention,
        )

    @property
    def _takes_part(self) -> bool:
        """Whether this rank writes, or digests its parts of tensors for the one that does."""
        return self._writer is not None or self._shards is not None

    def _digests(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> StartedDigests:
        if self._shards is None:
            return StartedDigests.of_whole(tensors)
        return StartedDigests(self._shards.pieces(kind, tensors), self._shards)

    def _record(self, trainer, pl_module, *, first: bool = False, loss: torch.Tensor | None = None) -> None:
        """Starts the digests of the step that was made; rank 0 writes the record when they are there."""
        states = named_states(pl_module, trainer.optimizers)
        started = {
            kind: self._gradients if kind == "gradients" else self._digests(kind, states[kind])
            for kind in self._options.due(self._step)
        }
        self._gradients = StartedDigests({})
        if self._writer is not None:
            self._append(trainer, started, first, loss)
            if not self._defers(pl_module):
                self.flush()

    def _append(
        self, trainer, started: Mapping[str, StartedDigests], first: bool, stock_loss: torch.Tensor | None
    ) -> None:
        strategy = trainer.strategy
        facts = None if first else self._facts
        clip = None if first else getattr(trainer.precision_plugin, "clip", None)
        agree = {
            "step": self._step,
            "epoch": facts.slice.epoch if facts is not None else trainer.current_epoch,
            "sample_ids": None if facts is None else _ids_digest(strategy.training_data.order, facts.slice),
            "sample_bytes": None if facts is None or facts.sample_digest is None else f"{facts.sample_digest:016x}",
            "learning_rates": [] if first else self._rates,
            "clip": None if clip is None else {"norm": float_bits(clip[0]), "coefficient": float_bits(clip[1])},
        }
        loss = stock_loss if facts is None else facts.loss
        fetched = None if loss is None else Fetched(loss)
        loggers = trainer.loggers if self._log and self._step % trainer.log_every_n_steps == 0 else []

        def write() -> None:
            with unrecorded():
                agree["loss"] = None if fetched is None else float_bits(fetched.tensor())
            self._write(agree, {kind: each.result() for kind, each in started.items()}, loggers)

        self._pending = write

    def _write(self, agree: dict[str, Any], leaves: dict[str, dict[str, bytes]], loggers: Iterable[Any]) -> None:
        step = agree["step"]
        agree["roots"] = {kind: None for kind in self._options.every if kind not in leaves}
        if not self._options.writes_leaves(step):
            agree["roots"] |= {kind: root(digests) for kind, digests in leaves.items()}
            leaves = {}
        record = self._writer.append(agree, leaves, {"time_ns": time.time_ns()})
        self._state = {"step": record.step, "trace": record.trace}
        numbers = {"trace": record.trace} | {kind: value for kind, value in record.agree["roots"].items() if value}
        for logger in loggers:
            logger.log_metrics({f"ledger/{name}": as_number(value) for name, value in numbers.items()}, step)

    @staticmethod
    def _defers(pl_module: torch.nn.Module) -> bool:
        """Whether a record is written one step late."""
        return any(parameter.is_cuda for parameter in pl_module.parameters())

    def _note_checkpoints(self, trainer) -> None:
        if self._writer is None:
            return
        saved = getattr(trainer.strategy, "saved_checkpoints", [])
        while saved:
            step, path = saved.pop(0)
            if os.path.isfile(path):
                self._writer.checkpoint(step, path, _file_digest(path))


def as_number(digest: str) -> float:
    """The first 48 bits of a digest in hex as a number in [0, 1), for a curve: equal for equal digests."""
    return int(digest[:12], 16) / 2**48


def _ids_digest(order: Any, here: Any) -> str:
    """BLAKE3 of the data set indices of a step in their global order, as little-endian int64."""
    return blake3(order.step(here.epoch, here.step).astype(np.dtype("<i8")).tobytes()).hexdigest()


def _file_digest(path: str) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()
