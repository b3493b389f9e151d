"""What people do with a Trainer works under the strategy, and none of it moves a bit of the training."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from tests.claims.trainings import Network, Split, bytes_of, spread_samples
from tests.strategies.small_fits import PLAIN, Logging, here, plain


class Items(Dataset):
    def __init__(self, count: int):
        self.x, self.y = spread_samples(count).tensors

    def __len__(self):
        return len(self.x)


class Augmented(Items):
    """Noise from a generator of the sample's own."""

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return self.x[index] + torch.rand(self.x.shape[1:], generator=generator), self.y[index]


class DictItems(Items):
    def __getitem__(self, index):
        return {"input": {"x": self.x[index]}, "label": (self.y[index], str(index))}


class DictNetwork(Network):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["input"]["x"]), batch["label"][0])


def doubled_collate(items):
    x, y = (torch.stack(part) for part in zip(*items, strict=True))
    return x * 1.0, y


@pytest.mark.parametrize(
    "change",
    [
        {"loader": {"num_workers": 2}},
        {"loader": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}},
        {"loader": {"pin_memory": True}},
        {"loader": {"collate_fn": doubled_collate}},
        {"data": DictItems, "build": DictNetwork},
        {"steps": -1, "trainer": {"max_epochs": 2}},
        {"trainer": {"num_sanity_val_steps": 2, "val_check_interval": 2}, "validation": 9},
        {"trainer": {"check_val_every_n_epoch": None, "val_check_interval": 3}, "validation": 9},
        {"trainer": {"reload_dataloaders_every_n_epochs": 1}},
        {"trainer": {"log_every_n_steps": 1, "profiler": "simple"}},
        {"trainer": {"detect_anomaly": True}},
        {"trainer": {"deterministic": True}},
        {"trainer": {"use_distributed_sampler": False}},
        {"trainer": {"limit_train_batches": 4}},
        {"split": Split(1, 4, 3), "trainer": {"limit_train_batches": 12}},
    ],
    ids=str,
)
def test_C41_C44_a_way_to_load_or_to_look_moves_no_bit(change):
    assert here(replace(PLAIN, **change)).weights == plain()


def test_C44_augmentation_seeded_by_the_sample_is_the_same_with_any_number_of_workers():
    runs = [replace(PLAIN, data=Augmented, steps=4, loader={"num_workers": workers}) for workers in (0, 1, 3)]
    first, *others = (here(run).weights for run in runs)
    assert all(weights == first for weights in others)
    assert first[1] != plain()[1]


def test_a_limit_of_batches_shortens_the_epochs_and_resumes(tmp_path):
    limited = replace(PLAIN, trainer={"limit_train_batches": 3}, loader={"shuffle": True})
    whole = here(limited)
    assert whole.weights[:4] == here(replace(limited, trainer={})).weights[:4]
    assert whole.weights[4] != here(replace(limited, trainer={})).weights[4]
    for stop in (4, 6):
        here(replace(limited, steps=stop, checkpoint=tmp_path / "stopped.ckpt"))
        assert here(replace(limited, resume=tmp_path / "stopped.ckpt")).weights == whole.weights[stop:]


class WithData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(spread_samples(48), batch_size=12)

    def val_dataloader(self):
        return [DataLoader(spread_samples(9), batch_size=4), DataLoader(spread_samples(5, seed=6), batch_size=4)]


class TwoValidationSets(Network):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


def test_a_datamodule_with_two_validation_sets(trainer):
    module, one = TwoValidationSets(), trainer(num_sanity_val_steps=1)
    one.fit(module, datamodule=WithData())
    assert bytes_of(module) == plain()[-1]
    assert {"validation_loss/dataloader_idx_0", "validation_loss/dataloader_idx_1"} <= set(one.callback_metrics)


def test_loggers_and_stock_callbacks(trainer, tmp_path):
    module = Logging(schedule="step", rate=0.2)
    callbacks = (
        EarlyStopping("validation_loss", patience=0, min_delta=1e9, check_on_train_epoch_end=False),
        LearningRateMonitor("step"),
        ModelCheckpoint(tmp_path, save_last=True),
    )
    loader, validation = DataLoader(spread_samples(48), batch_size=12), DataLoader(spread_samples(9), batch_size=4)
    one = trainer(*callbacks, logger=CSVLogger(tmp_path), enable_checkpointing=True, log_every_n_steps=1, max_steps=80)
    one.fit(module, loader, validation)
    assert one.global_step == 8, "early stopping after the second epoch"
    metrics = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "train_loss_step" in metrics[0] and "lr-SGD" in metrics[0] and len(metrics) > 8
    assert (tmp_path / "last.ckpt").exists()


def test_fast_dev_run(trainer):
    module = Network()
    one = trainer(fast_dev_run=2)
    one.fit(module, DataLoader(spread_samples(48), batch_size=12), DataLoader(spread_samples(9), batch_size=4))
    assert bytes_of(module) == plain()[2]
