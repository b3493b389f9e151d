"""Settings of the recorded Trainer that decide which samples come next are part of a replay."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import in_new_process
from tests.claims.trainings import Network, spread_samples


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(spread_samples(50), batch_size=6, shuffle=True)


class Adapting(Network):
    """An optimizer and a schedule of its own; a hook that changes gradients before the step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def on_before_optimizer_step(self, optimizer):
        self.output.bias.grad.mul_(0.5)


def build():
    return Adapting(), Data()


def recorded(folder: Path, **arguments) -> None:
    quiet_lightning()
    module, data = build()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DetStrategy(seed=4),
        callbacks=[WeightLedger(folder, entry="tests.replay.test_recorded_settings:build")],
        **{"max_steps": 11, **QUIET_TRAINER, **arguments},
    )
    trainer.fit(module, data)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments",
    [
        {"limit_train_batches": 6, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": -1, "max_epochs": 2},
    ],
    ids=str,
)
def test_a_run_is_replayed_with_its_own_settings(arguments, tmp_path):
    in_new_process(recorded, tmp_path / "ledger", **arguments)
    result = in_new_process(replay, tmp_path / "ledger", world=2)
    assert result.matched, result.first
    assert result.steps > 10
