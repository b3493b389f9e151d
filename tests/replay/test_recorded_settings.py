"""Settings of the recorded Trainer that decide which samples come next are part of a replay."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from det_lightning.ledger.record import float_bits
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.replay.settings import as_recorded, ddp_options
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import in_new_process
from tests.claims.trainings import CLASSES, FEATURES, Network, spread_samples


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


class ValidatedData(Data):
    def val_dataloader(self):
        return DataLoader(spread_samples(20), batch_size=5)


class Validated(LightningModule):
    """Draws random numbers in training, and lowers its learning rate by what validation logs."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, width), torch.nn.Dropout(0.25), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
        )

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Wide(Validated):
    """Sums that a processor cuts by threads."""

    def training_step(self, batch, batch_idx):
        hidden = F.layer_norm(self.net[0](batch[0]), (self.net[0].out_features,), self.scale)
        return F.cross_entropy(self.net[3](hidden), batch[1])

    def __init__(self, width: int):
        super().__init__(width)
        self.scale = torch.nn.Parameter(torch.linspace(-1, 1, width))


def build():
    return Adapting(), Data()


def build_validated(width: int = 8, wide: bool = False):
    return (Wide if wide else Validated)(width), ValidatedData()


def recorded(
    folder: Path, *, entry="build", options=None, strategy="det", threads=1, named=True, save=False, **arguments
) -> None:
    """Trains and records what `entry` of this module builds; `named`: and how to build it."""
    quiet_lightning()
    torch.set_num_threads(threads)
    seed_everything(7, verbose=False)
    module, data = globals()[entry](**(options or {}))
    path = f"tests.replay.test_recorded_settings:{entry}"
    saved = [ModelCheckpoint(folder.parent, every_n_epochs=1, save_top_k=-1)] if save else []
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy={"det": lambda: DetStrategy(seed=4), "ddp": DDPStrategy, "auto": lambda: "auto"}[strategy](),
        callbacks=[
            WeightLedger(folder, entry=path, entry_arguments=options) if named else WeightLedger(folder),
            *saved,
        ],
        **{"max_steps": 11, **QUIET_TRAINER, "enable_checkpointing": save, **arguments},
    )
    trainer.fit(module, data)
    if dist.is_initialized():
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


@pytest.mark.parametrize(
    ("arguments", "world"),
    [
        ({"overfit_batches": 4, "accumulate_grad_batches": 2}, 2),
        ({"entry": "build_validated"}, 2),
        ({"entry": "build_validated", "limit_val_batches": 2, "val_check_interval": 3}, 1),
        ({"entry": "build_validated", "strategy": "auto"}, 1),
        ({"entry": "build_validated", "strategy": "auto", "limit_train_batches": 3, "val_check_interval": 0.34}, 1),
        ({"strategy": "auto", "overfit_batches": 2}, 1),
        ({"entry": "build_validated", "strategy": "auto", "reload_dataloaders_every_n_epochs": 1}, 1),
        ({"strategy": "auto", "entry": "build_validated", "options": {"width": 2048, "wide": True}, "threads": 2}, 1),
    ],
    ids=str,
)
def test_a_healthy_run_is_accused_of_nothing_for_its_settings(arguments, world, tmp_path):
    """Batches that are left out or repeated, validation, which draws random numbers and moves schedules, and threads."""
    in_new_process(recorded, tmp_path / "ledger", **arguments)
    result = in_new_process(replay, tmp_path / "ledger", world=world)
    assert result.matched, result.first
    assert result.steps == 11


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_a_run_that_names_no_entry_is_replayed_with_its_seed_and_its_clipping(strategy, tmp_path):
    options = {"entry": "build_validated", "strategy": strategy, "named": False, "gradient_clip_val": 0.01}
    in_new_process(recorded, tmp_path / "ledger", **options)
    entry = "tests.replay.test_recorded_settings:build_validated"
    result = in_new_process(replay, tmp_path / "ledger", entry=entry)
    assert result.matched, result.first


def test_a_replay_does_not_begin_where_a_schedule_has_not_looked_at_its_epoch_yet(tmp_path):
    in_new_process(recorded, tmp_path / "ledger", entry="build_validated", save=True, max_steps=20)
    with LedgerReader(tmp_path / "ledger") as reader:
        assert [each.step for each in reader.checkpoints()] == [9, 18, 20]
    result = in_new_process(replay, tmp_path / "ledger", start=10)
    assert result.matched, result.first
    assert (result.start, result.steps) == (0, 20)


def test_options_of_ddp_are_given_again(tmp_path):
    in_new_process(recorded, tmp_path / "ledger", strategy="ddp")
    with LedgerReader(tmp_path / "ledger") as reader:
        given = {
            "find_unused_parameters": True,
            "bucket_cap_mb": float_bits(0.5),
            "process_group": "x",
            "static_graph": "x",
        }
        assert ddp_options({"trainer": {"ddp": given}}) == {"find_unused_parameters": True, "bucket_cap_mb": 0.5}
        assert ddp_options(reader.entry) == ddp_options({"trainer": {"ddp": 5}}) == {}


def test_threads_and_switches_are_put_back(monkeypatch):
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    flags = {"default_dtype": "torch.float64", "deterministic_algorithms": True, "float32_matmul_precision": "../x"}
    with (
        pytest.raises(RuntimeError, match="planted"),
        as_recorded({"arithmetic": "stock DDPStrategy"}, {"threads": 3, "flags": flags}),
    ):
        assert torch.get_num_threads() == 3 and torch.get_default_dtype() is torch.float64
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        raise RuntimeError("planted")
    assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    with as_recorded({"arithmetic": "det"}, {"threads": 3, "flags": {"default_dtype": "torch.nn", "x": 1}}):
        assert torch.get_num_threads() == before[0]
