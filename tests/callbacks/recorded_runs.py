"""Small trainings with a ledger, for the tests of what is in it."""

from pathlib import Path

from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.replay.recorded import build


class RaisingNetwork(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("planted")


def fit(folder: Path, *, steps: int, resume: str | None = None, callback: Callback | None = None, ledger="ledger"):
    """One training with a checkpoint every third step."""
    quiet_lightning()
    module, loader = build()
    arguments = {name: value for name, value in QUIET_TRAINER.items() if name != "enable_checkpointing"}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DetStrategy(seed=4),
        max_steps=steps,
        callbacks=[
            *([callback] if callback else []),
            WeightLedger(folder / ledger),
            ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
        ],
        **arguments,
    )
    trainer.fit(module, loader, ckpt_path=resume)


def record_under_ddp(path: Path) -> None:
    quiet_lightning()
    module, loader = build()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DDPStrategy(),
        max_steps=5,
        callbacks=[WeightLedger(path)],
        **QUIET_TRAINER,
    )
    trainer.fit(module, loader)


def traces(path: Path) -> dict[int, str]:
    with LedgerReader(path) as reader:
        return {record.step: record.trace for record in reader.records()}
