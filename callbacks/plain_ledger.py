"""A ledger of a training loop that Lightning does not run."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from det_lightning.callbacks.recording import recording_options
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import Fetched, StartedDigests

from det_lightning.distributed.replicas import drift_of
from det_lightning.errors import InputError, ReplicaError
from det_lightning.ledger.digest import value_digest
from det_lightning.ledger.record import KINDS, float_bits, root
from det_lightning.ledger.store import LedgerWriter


class PlainLedger:
    """Records a hand-written loop; call `before_step` before and `after_step` after each `optimizer.step()`.

        with PlainLedger("runs/a", model, optimizer, recipe={"seed": 1}) as ledger:
            for batch in loader:
                loss = model(batch)
                loss.backward()
                ledger.before_step()
                optimizer.step()
                ledger.after_step(loss=loss, batch=batch)

    Rank 0 of the default process group writes. Where the model is sharded (`fully_shard`, DTensor, FSDP with
    use_orig_params), every rank makes one and calls both, and the digests are those of the whole tensors. With `replicas`,
    every rank calls both, and copies that drift apart are named by rank and tensor.

    Args:
        path: directory that holds no ledger yet.
        recipe: what must agree between runs that are meant to be equal; numbers as float_bits, strings, lists, dicts.
        environment: what may differ.
        kinds, leaves_every_n_steps, keep_leaves, keep_leaves_every_n_steps: as for WeightLedger.
        replicas: every rank holds a copy of all tensors, and they are compared after every step.

    Raises:
        InputError: an unknown kind, an interval below 1, shards with `replicas`; `after_step` without `before_step` though
            gradients are recorded.
        LedgerError: the directory holds a ledger, or cannot be written.
        ReplicaError: from `after_step`, on every rank, if the copies differ.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        recipe: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        kinds: Iterable[str] | Mapping[str, int] = KINDS,
        leaves_every_n_steps: int = 1,
        keep_leaves: int | None = None,
        keep_leaves_every_n_steps: int | None = None,
        replicas: bool = False,
    ):
        self._options = recording_options(kinds, leaves_every_n_steps, keep_leaves, keep_leaves_every_n_steps)
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._replicas, self._step = replicas, 0
        self._gradients: StartedDigests | None = None
        self._pending: Callable[[], None] | None = None  # writes the record whose digests are still under way
        self._shards = Shards.of(model)
        if replicas and self._shards is not None:
            raise InputError("replicas=True compares copies, but the ranks hold shards of this model; leave it out")
        self._writes = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._writer: LedgerWriter | None = None
        if self._writes:
            self._writer = LedgerWriter.create(
                path,
                recipe=recipe or {},
                environment={"recording": self._options.header(), **(environment or {})},
                entry={},
                retention=self._options.retention,
            )
        self._record({})

    def before_step(self) -> None:
        """Digests the gradients; they must be reduced by now."""
        due = self._options.is_due("gradients", self._step + 1) and self._takes_part
        self._gradients = self._digests("gradients", named_states(self._model, [])["gradients"] if due else {}, due)

    def after_step(self, *, loss: torch.Tensor | None = None, batch: Any = None, epoch: int = 0) -> None:
        """Records the step. loss: without dimensions. batch: digested as it is, on this rank.

        Of a model on a CUDA device the record is written when the next step is recorded, so that the device is never waited
        for.
        """
        if self._gradients is None and "gradients" in self._options.every:
            raise InputError("after_step was called without before_step; gradients are digested there")
        self._step += 1
        self._record(
            {
                "epoch": epoch,
                "sample_bytes": None if batch is None else f"{value_digest(batch):016x}",
                "learning_rates": [float_bits(float(g["lr"])) for o in self._optimizers for g in o.param_groups],
            },
            loss,
        )
        self._gradients = None

    def flush(self) -> None:
        """Writes the last record now."""
        write, self._pending = self._pending, None
        if write is not None:
            write()

    def close(self) -> None:
        """Says that the run is finished; a second call does nothing."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> "PlainLedger":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.abandon()

    @property
    def _takes_part(self) -> bool:
        return self._writes or self._replicas or self._shards is not None

    def _digests(self, kind: str, tensors: Mapping[str, torch.Tensor], due: bool = True) -> StartedDigests:
        if self._shards is None or not due:
            return StartedDigests.of_whole(tensors)
        return StartedDigests(self._shards.pieces(kind, tensors), self._shards)

    def _record(self, fields: Mapping[str, Any], loss: torch.Tensor | None = None) -> None:
        self.flush()
        if not self._takes_part:
            return
        states = named_states(self._model, self._optimizers)
        started = {
            kind: (self._gradients or StartedDigests({})) if kind == "gradients" else self._digests(kind, states[kind])
            for kind in self._options.due(self._step)
        }
        step, fetched = self._step, None if loss is None else Fetched(loss)

        def write() -> None:
            leaves = {kind: each.result() for kind, each in started.items()}
            if self._writer is not None:
                self._write(step, leaves, {**fields, "loss": None if fetched is None else float_bits(fetched.tensor())})
            if self._replicas:
                _compare_copies(step, leaves)

        self._pending = write
        if self._replicas or not any(parameter.is_cuda for parameter in self._model.parameters()):
            self.flush()

    def _write(self, step: int, leaves: Mapping[str, Mapping[str, bytes]], fields: Mapping[str, Any]) -> None:
        agree = {
            "step": step,
            "epoch": 0,
            "sample_ids": None,
            "sample_bytes": None,
            "learning_rates": [],
            "clip": None,
            "roots": {kind: None for kind in self._options.every if kind not in leaves},
            **fields,
        }
        if not self._options.writes_leaves(step):
            agree["roots"] |= {kind: root(digests) for kind, digests in leaves.items()}
            leaves = {}
        self._writer.append(agree, leaves, {"time_ns": time.time_ns()})


def _compare_copies(step: int, leaves: Mapping[str, Mapping[str, bytes]]) -> None:
    drift = drift_of({f"{kind} {name}": each for kind, named in leaves.items() for name, each in named.items()})
    if drift is not None:
        raise ReplicaError(f"after step {step} the replicas differ: {drift.words}", step=step, ranks=drift.ranks)
