"""One rank of a replay: builds the run from its ledger's entry and trains up to a step, recording a ledger of its own."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from det_lightning.callbacks.weight_ledger import WeightLedger
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.entry import build, trainer_arguments
from det_lightning.strategies.given_ranks import given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy


@dataclass(frozen=True)
class ReplayPlan:
    """What to run again.

    Attributes:
        reference: directory of the recorded ledger.
        out: directory of the replay's own ledger.
        stop: the last step to run.
        checkpoint: file to start from, or None: from the beginning.
    """

    reference: Path
    out: Path
    stop: int
    checkpoint: str | None
    world_size: int
    accumulate: int
    entry: str | None


class _StopAtDivergence(Callback):
    """Ends the replay after the first record whose trace differs; placed behind the ledger that it reads."""

    def __init__(self, reference: Path, ledger: WeightLedger, progress: Any):
        self.reference, self.ledger, self.progress = LedgerReader(reference), ledger, progress
        self.step = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        differs = trainer.is_global_zero and self.reference.record(self.step).trace != self.ledger.state_dict()["trace"]
        if self.progress is not None:
            self.progress(self.step)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(bool(differs), all=False)


def run_rank(
    rank: int, world_size: int, port: int, plan: ReplayPlan, progress: Callable[[int], None] | None = None
) -> dict[str, np.ndarray]:
    """Replays on one rank; returns its weights in their last state, by name."""
    quiet_lightning()
    with LedgerReader(plan.reference) as reader:
        entry, data_recipe = reader.entry, reader.recipe["data"]
    module, data = build(entry, plan.entry)
    ledger = WeightLedger(plan.out, entry=plan.entry or entry["function"], entry_arguments=entry.get("arguments"))
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DetStrategy(
            cluster_environment=given_ranks(rank, world_size, port),
            global_batch=data_recipe["global_batch"],
            seed=data_recipe["seed"],
        ),
        accumulate_grad_batches=plan.accumulate,
        max_steps=plan.stop,
        max_epochs=-1,
        callbacks=[ledger, _StopAtDivergence(plan.reference, ledger, progress)],
        limit_train_batches=data_recipe["steps_per_epoch"] * plan.accumulate,
        limit_val_batches=0,
        **trainer_arguments(entry),
        **QUIET_TRAINER,
    )
    try:
        trainer.fit(module, data, ckpt_path=plan.checkpoint)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}


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
