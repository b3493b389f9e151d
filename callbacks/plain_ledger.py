"""A ledger of a training loop that Lightning does not run."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from det_lightning.callbacks.recording import recording_options
from det_lightning.callbacks.replicas import drift_of
from det_lightning.callbacks.run_states import named_states
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import StartedDigests, digests_of

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
        self._gradients: dict[str, bytes] | None = None
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
        due = self._options.is_due("gradients", self._step + 1)
        takes_part = self._writes or self._replicas or self._shards is not None
        gradients = named_states(self._model, [])["gradients"] if due and takes_part else {}
        self._gradients = self._digests("gradients", gradients) if due and takes_part else {}

    def after_step(self, *, loss: torch.Tensor | None = None, batch: Any = None, epoch: int = 0) -> None:
        """Writes the record of the step. loss: without dimensions. batch: digested as it is, on this rank."""
        if self._gradients is None and "gradients" in self._options.every:
            raise InputError("after_step was called without before_step; gradients are digested there")
        self._step += 1
        self._record(
            {
                "epoch": epoch,
                "loss": None if loss is None else float_bits(loss.detach().cpu()),
                "sample_bytes": None if batch is None else f"{value_digest(batch):016x}",
                "learning_rates": [float_bits(float(g["lr"])) for o in self._optimizers for g in o.param_groups],
            }
        )
        self._gradients = None

    def close(self) -> None:
        """Says that the run is finished; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> "PlainLedger":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.abandon()

    def _digests(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        if self._shards is None:
            return digests_of(tensors)
        return StartedDigests(self._shards.pieces(kind, tensors), self._shards).result()

    def _record(self, fields: Mapping[str, Any]) -> None:
        if not (self._writes or self._replicas or self._shards is not None):
            return
        states = named_states(self._model, self._optimizers)
        leaves = {
            kind: (self._gradients or {}) if kind == "gradients" else self._digests(kind, states[kind])
            for kind in self._options.due(self._step)
        }
        if self._writer is not None:
            agree = {
                "step": self._step,
                "epoch": 0,
                "sample_ids": None,
                "sample_bytes": None,
                "loss": None,
                "learning_rates": [],
                "clip": None,
                "roots": {kind: None for kind in self._options.every if kind not in leaves},
                **fields,
            }
            written = leaves
            if not self._options.writes_leaves(self._step):
                agree["roots"] |= {kind: root(digests) for kind, digests in leaves.items()}
                written = {}
            self._writer.append(agree, written, {"time_ns": time.time_ns()})
        if self._replicas:
            drift = drift_of({f"{kind} {name}": each for kind, named in leaves.items() for name, each in named.items()})
            if drift is not None:
                raise ReplicaError(
                    f"after step {self._step} the replicas differ: {drift.words}", step=self._step, ranks=drift.ranks
                )
