"""One rank of a replay: builds the run from its ledger's entry and trains up to a step, recording a ledger of its own."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy

from det_lightning.callbacks.recording import NO_KINDS
from det_lightning.callbacks.weight_ledger import WeightLedger
from det_lightning.ledger.record import with_floats
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.entry import build
from det_lightning.replay.settings import as_recorded, ddp_options, trainer_arguments
from det_lightning.replay.step_recorder import Recording, StepRecorder
from det_lightning.strategies.given_ranks import given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy


@dataclass(frozen=True)
class ReplayPlan:
    """What to run again.

    Attributes:
        reference: directory of the recorded ledger, which the replay is compared with and which ends it at the first
            difference; None: there is nothing to compare with.
        recipe, entry, environment: as in a ledger's header.
        recording_of: what is recorded, as in the header's environment: kind -> every how many steps.
        out: directory of the replay's own ledger.
        stop: the last step to run.
        checkpoint: file to start from, or None: from the beginning.
        override: "package.module:function" instead of the recorded entry.
        recording: the step whose operations are to be recorded, if any.
        accelerator: "cpu", or "gpu", where every rank has one of its own.
    """

    reference: Path | None
    recipe: dict[str, Any]
    entry: dict[str, Any]
    recording_of: dict[str, int]
    out: Path
    stop: int
    checkpoint: str | None
    world_size: int
    accumulate: int
    override: str | None
    recording: Recording | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"

    @property
    def recorded_split(self) -> tuple[int, int] | None:
        """(world size, accumulation) of the run, if they are known."""
        split = self.environment.get("world_size"), self.environment.get("accumulate")
        return split if all(type(each) is int and each > 0 for each in split) else None


class _StopAtDivergence(Callback):
    """Ends the replay after the first record whose trace differs; placed behind the ledger that it reads."""

    def __init__(self, reference: Path | None, ledger: WeightLedger, progress: Any):
        self.reference = None if reference is None else LedgerReader(reference)
        self.ledger, self.progress = ledger, progress
        self.step = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        compared = trainer.is_global_zero and self.reference is not None
        differs = compared and self.reference.record(self.step).trace != self.ledger.state_dict()["trace"]
        if self.progress is not None:
            self.progress(self.step)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(bool(differs), all=False)


def run_rank(
    rank: int, world_size: int, port: int, plan: ReplayPlan, progress: Callable[[int], None] | None = None
) -> dict[str, np.ndarray]:
    """Replays on one rank; returns its weights in their last state, by name."""
    quiet_lightning()
    with as_recorded(plan.recipe, plan.environment):
        return _run(rank, port, plan, progress)


def _run(rank: int, port: int, plan: ReplayPlan, progress: Callable[[int], None] | None) -> dict[str, np.ndarray]:
    run = build(plan.entry, plan.override)
    ledger = WeightLedger(
        plan.out,
        entry=plan.override or plan.entry["function"],
        entry_arguments=_arguments(plan),
        kinds={kind: every for kind, every in plan.recording_of.items() if kind not in NO_KINDS},
        leaves_every_n_steps=plan.recording_of.get("leaves", 1),
    )
    callbacks = [*run.callbacks, ledger, _StopAtDivergence(plan.reference, ledger, progress)]
    if plan.recording is not None:
        recorder = StepRecorder(plan.recording)
        callbacks = [recorder, *callbacks, recorder.after]
    trainer = Trainer(
        accelerator=plan.accelerator,
        devices=plan.world_size,
        max_steps=plan.stop,
        max_epochs=-1,
        callbacks=callbacks,
        **_strategy(plan, rank, port),
        **trainer_arguments(plan.entry, plan.recipe, plan.recorded_split, (plan.world_size, plan.accumulate)),
        **QUIET_TRAINER,
    )
    try:
        trainer.fit(run.module, run.data, ckpt_path=plan.checkpoint, weights_only=plan.checkpoint is not None)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return {name: array_of(parameter) for name, parameter in run.module.named_parameters()}


def _arguments(plan: ReplayPlan) -> dict[str, Any] | None:
    same = plan.override in (None, plan.entry.get("function"))
    return with_floats(plan.entry.get("arguments")) if same else None


def _strategy(plan: ReplayPlan, rank: int, port: int) -> dict[str, Any]:
    """The Trainer's arguments that make the arithmetic of the recorded run."""
    recipe = plan.recipe
    if recipe["arithmetic"] == "det":
        data = recipe["data"]
        return {
            "strategy": DetStrategy(
                cluster_environment=given_ranks(rank, plan.world_size, port),
                global_batch=data["global_batch"],
                seed=data["seed"],
                stock_optimizers=bool(recipe.get("lost_claims")),
            ),
            "precision": recipe.get("precision", "32-true"),
            "accumulate_grad_batches": plan.accumulate,
        }
    stock = {"accumulate_grad_batches": plan.accumulate, "precision": recipe["precision"]}
    if plan.world_size == 1 and "SingleDevice" in recipe["arithmetic"]:
        return stock | {"strategy": "auto"}
    cluster = given_ranks(rank, plan.world_size, port)
    backend = "gloo" if plan.accelerator == "cpu" else None  # the device's own
    options = ddp_options(plan.entry)
    return stock | {"strategy": DDPStrategy(cluster_environment=cluster, process_group_backend=backend, **options)}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as an array of its own; bfloat16, which NumPy has no type for, as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.numpy().copy()


QUIET_TRAINER: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_lightning() -> None:
    """Lightning's notes on hardware and workers are not part of an answer."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*(dataloader|LeafSpec|num_workers).*")
