"""What people do with a Trainer works under the strategy, and none of it moves a bit of the training."""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy

from det_lightning.errors import UncoveredError
from det_lightning.layers.linear import DetLinear
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import free_port, given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import Failed, in_new_process, on_ranks
from tests.claims.test_world_size import trained
from tests.claims.trainings import CLASSES, Network, Run, Split, bytes_of, spread_samples, train

PLAIN = Run(split=Split(1, 12, 1), samples=48, steps=8)


@cache
def plain():
    return here(PLAIN).weights


def here(run: Run):
    """The run with one rank in this process."""
    return train(0, 1, free_port(), run)


# Data in every shape


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


def trainer_of(rank, world_size, port, *callbacks, **arguments) -> Trainer:
    quiet_lightning()
    options = {"max_steps": 8, "max_epochs": -1, "gradient_clip_val": 0.05, **QUIET_TRAINER, **arguments}
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DetStrategy(cluster_environment=given_ranks(rank, world_size, port)),
        callbacks=list(callbacks),
        **options,
    )


@pytest.fixture
def trainer():
    """() -> a Trainer with one rank in this process."""
    yield lambda *callbacks, **arguments: trainer_of(0, 1, free_port(), *callbacks, **arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_datamodule_with_two_validation_sets(trainer):
    module, one = TwoValidationSets(), trainer(num_sanity_val_steps=1)
    one.fit(module, datamodule=WithData())
    assert bytes_of(module) == plain()[-1]
    assert {"validation_loss/dataloader_idx_0", "validation_loss/dataloader_idx_1"} <= set(one.callback_metrics)


class Logging(Network):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


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


# One fit after another


class Forgetful(Network):
    """No momentum: Lightning makes new optimizers at every fit."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@cache
def forgetful():
    return here(replace(PLAIN, build=Forgetful)).weights


class RaisesOnce(Forgetful):
    """An exception after half of the third step's micro-batches went backward."""

    def __init__(self):
        super().__init__()
        self.countdown = None

    def on_before_backward(self, loss):
        if self.trainer.global_step == 2 and self.countdown is None:
            self.countdown = self.trainer.accumulate_grad_batches // 2
        if self.countdown == 0:
            self.countdown = -1
            raise RuntimeError("in the middle of a step")
        if self.countdown is not None:
            self.countdown -= 1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_fit_that_follows_an_exception_within_a_step_goes_on_to_the_same_bytes(trainer, accumulate):
    module, loader = RaisesOnce(), DataLoader(spread_samples(48), batch_size=12 // accumulate)
    one = trainer(accumulate_grad_batches=accumulate)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        one.fit(module, loader)
    assert type(module.hidden) is nn.Linear and "log" not in module.__dict__
    assert bytes_of(module) == forgetful()[2]
    assert torch.sigmoid(torch.zeros(1)).item() == 0.5, "the function mode is off"
    one.fit(module, loader)
    assert one.global_step == 8
    assert bytes_of(module) == forgetful()[-1]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_saved_on_an_exception_within_a_step_takes_that_step_anew(trainer, accumulate, tmp_path):
    module, loader = RaisesOnce(), DataLoader(spread_samples(48), batch_size=12 // accumulate)
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=5, filename="saved")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        trainer(saver, accumulate_grad_batches=accumulate, enable_checkpointing=True).fit(module, loader)
    assert type(module.hidden) is nn.Linear
    resumed = here(replace(PLAIN, build=Forgetful, split=Split(1, 6, 2), resume=tmp_path / "saved.ckpt"))
    assert resumed.weights == forgetful()[2:]


def test_weights_saved_alone_on_an_exception_hide_nothing(trainer, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, save_weights_only=True, filename="saved")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        one = trainer(saver, accumulate_grad_batches=3, enable_checkpointing=True)
        one.fit(RaisesOnce(), DataLoader(spread_samples(48), batch_size=4))
    state = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    assert b"".join(tensor.numpy().tobytes() for _, tensor in sorted(state.items())) == forgetful()[2]


def test_a_refusal_leaves_the_model_as_it_was(trainer):
    class Refused(Network):
        def training_step(self, batch, batch_idx):
            return torch.sigmoid(super().training_step(batch, batch_idx))

    module = Refused()
    with pytest.raises(UncoveredError):
        trainer().fit(module, DataLoader(spread_samples(48), batch_size=12))
    assert type(module.hidden) is nn.Linear and "log" not in module.__dict__
    assert torch.sigmoid(torch.zeros(1)).item() == 0.5


def test_layers_are_exact_during_the_fit_and_stock_after_it(trainer):
    class Looks(Callback):
        seen: ClassVar[list[type]] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(type(pl_module.hidden))

    module = Network()
    identities = [id(parameter) for parameter in module.parameters()]
    trainer(Looks()).fit(module, DataLoader(spread_samples(48), batch_size=12))
    assert set(Looks.seen) == {DetLinear}
    assert type(module.hidden) is type(module.output) is nn.Linear
    assert [id(parameter) for parameter in module.parameters()] == identities
    assert list(module.state_dict()) == list(Network().state_dict())


@pytest.mark.parametrize("stop", [4, 6])
def test_a_second_fit_of_one_trainer_goes_on_where_the_first_stood(trainer, stop):
    module, loader = Forgetful(), DataLoader(spread_samples(48), batch_size=12)
    one = trainer(max_steps=stop)
    one.fit(module, loader)
    assert bytes_of(module) == forgetful()[stop]
    one.fit_loop.epoch_loop.max_steps = 8
    one.fit(module, loader)
    assert one.global_step == 8
    assert bytes_of(module) == forgetful()[-1]


def test_the_same_module_trained_by_two_trainers_is_trained_twice(trainer):
    loader = DataLoader(spread_samples(48), batch_size=12)
    module = Network()
    for _ in range(2):
        trainer().fit(module, loader)
    other = Network()
    for _ in range(2):
        trainer().fit(other, loader)
    assert bytes_of(module) == bytes_of(other) != plain()[-1]


def test_configure_model_and_no_optimizer(trainer):
    class Late(Network):
        def configure_model(self):
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(2, 2)

    class Nothing(Network):
        def configure_optimizers(self):
            return None

    loader = DataLoader(spread_samples(48), batch_size=12)
    trainer().fit(Late(), loader)
    with pytest.raises(UncoveredError, match="configure_optimizers"):
        trainer().fit(Nothing(), loader)


# Evaluation


class Seen(Network):
    """Counts and records what it is shown, in each of the ways that people count."""

    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES, average="micro")
        self.right = Accuracy("multiclass", num_classes=CLASSES, average="micro")

    def _look(self, batch):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("count", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("mean_position", (y * 2).float().mean(), sync_dist=True, batch_size=len(x))
        self.log("inferred", (y * 2).float().mean(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._look(batch)

    def test_step(self, batch, batch_idx):
        self._look(batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0]


def evaluate(rank, world_size, port, samples: int, batch: int):
    one = trainer_of(rank, world_size, port, max_steps=4, num_sanity_val_steps=0)
    loader = DataLoader(spread_samples(samples), batch_size=batch)
    module = Seen()
    one.fit(module, DataLoader(spread_samples(48), batch_size=12 // world_size), loader)
    values = [{name: float(value) for name, value in one.callback_metrics.items()}]
    values += [one.validate(module, loader, verbose=False)[0], one.test(module, loader, verbose=False)[0]]
    if samples < world_size:
        return values, None  # refused, see below
    predicted = [row.numpy().tobytes() for part in one.predict(module, loader) for row in part]
    assert one.validate(module, loader, verbose=False)[0] == values[1]
    assert type(module.hidden) is nn.Linear
    return values, predicted


@pytest.mark.parametrize(("samples", "batch"), [(21, 4), (13, 4), (2, 4)])
def test_C39_C40_every_sample_is_evaluated_exactly_once(samples, batch):
    x, y = spread_samples(samples).tensors
    mean = float((y * 2).double().mean().float())
    expected = sorted(row.numpy().tobytes() for row in x)
    for world_size in (1, 2, 3):
        ranks = on_ranks(world_size, evaluate, samples, batch)
        for values, _ in ranks:
            assert [each["count"] for each in values] == [samples] * 3
            assert values[0] == values[1] == values[2] == ranks[0][0][0]
            assert values[0]["mean_position"] == values[0]["inferred"]
            assert values[0]["inferred"] == mean
        if samples >= world_size:
            assert sorted(row for _, predicted in ranks for row in predicted) == expected


def predict_two(rank, world_size, port):
    return trainer_of(rank, world_size, port).predict(Seen(), DataLoader(spread_samples(2), batch_size=1))


def test_predicting_fewer_samples_than_ranks_is_refused_with_both_numbers():
    with pytest.raises(Failed, match=r"Trainer\.predict got 2 samples for 3 ranks.*devices=2 or fewer"):
        on_ranks(3, predict_two)


def predict_two_forked() -> None:
    three = Trainer(strategy="det_fork", accelerator="cpu", devices=3, **QUIET_TRAINER)
    three.predict(Seen(), [DataLoader(spread_samples(3)), DataLoader(spread_samples(2))])


def test_predicting_fewer_samples_than_ranks_is_refused_where_the_ranks_are_forked():
    with pytest.raises(Failed, match=r"Trainer\.predict got 2 samples for 3 ranks.*devices=2 or fewer"):
        in_new_process(predict_two_forked)


def predict_several(rank, world_size, port) -> tuple[list[int], list[str]]:
    one = trainer_of(rank, world_size, port)
    loaders = [DataLoader(spread_samples(samples)) for samples in (2, 5)]
    lengths = [len(batches) for batches in one.predict(Seen(), loaders)]
    return lengths, sorted(vars(one.predict_loop._data_source))


def test_several_loaders_are_predicted_and_the_trainer_is_as_before():
    assert on_ranks(2, predict_several) == [([1, 3], ["instance", "name"]), ([1, 2], ["instance", "name"])]


def test_dropping_the_last_of_an_evaluation_drops_the_same_samples_at_every_split():
    counts = {world: on_ranks(world, evaluate_dropping, 21, 4)[0] for world in (1, 2, 3)}
    assert counts == {1: 20, 2: 20, 3: 20}


def evaluate_dropping(rank, world_size, port, samples: int, batch: int) -> int:
    loader = DataLoader(spread_samples(samples), batch_size=batch, drop_last=True)
    return int(trainer_of(rank, world_size, port).validate(Seen(), loader, verbose=False)[0]["count"])


# State of the module at the start


class Buffers(Network):
    """Ranks begin with different states, and with tensors that collectives are fussy about."""

    def __init__(self):
        super().__init__(seed=3 + (dist.get_rank() if dist.is_initialized() else 0))
        self.hidden.weight = nn.Parameter(self.hidden.weight.detach().t().contiguous().t())
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("rough", torch.rand(3).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("phase", torch.rand(2, dtype=torch.complex64))


def train_unlike(rank, world_size, port):
    torch.manual_seed(rank)
    module = Buffers()
    with torch.no_grad():
        module.output.weight += rank
    one = trainer_of(rank, world_size, port, max_steps=3)
    one.fit(module, DataLoader(spread_samples(48), batch_size=12 // world_size))
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in module.buffers()]
    return bytes_of(module), [buffer.float().numpy().tobytes() for buffer in buffers]


def test_every_rank_starts_from_the_state_of_the_first():
    ranks = on_ranks(2, train_unlike)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == on_ranks(1, train_unlike)[0][0]


def test_no_rank_drifts_when_ranks_log_and_validate(tmp_path):
    run = replace(PLAIN, split=Split(3, 2, 2), build=Logging, validation=7, trainer={"num_sanity_val_steps": 2})
    assert trained(run).weights == plain()
