"""The promise: a run that is stopped and resumed, at any split, is the run that was never stopped."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from det_lightning.ledger.store import LedgerReader
from tests.claims.processes import Failed, on_ranks
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import Network, Run, Split, train

STEPS_OF_AN_EPOCH = 5  # 58 samples, 12 a step: the last step of an epoch has 10
SPLITS = {1: Split(1, 12, 1), 2: Split(2, 2, 3), 3: Split(3, 2, 2), 4: Split(4, 3, 1)}


def by_step() -> Network:
    return Network(schedule="step")


def by_epoch() -> Network:
    return Network(schedule="epoch")


SHUFFLED = Run(
    steps=24, samples=58, validation=9, build=by_step, loader={"shuffle": True}, options={"global_batch": 12, "seed": 9}
)


@cache
def straight(run: str = "SHUFFLED"):
    """Never stopped, with one rank."""
    return outcome_of(replace(globals()[run], split=SPLITS[1]))


def outcome_of(run: Run):
    return on_ranks(run.split.world_size, train, run)[0]


def assert_continues(resumed, expected, step: int) -> None:
    """`resumed` went on from `step` of `expected`, byte for byte."""
    tail = replace(
        expected,
        weights=expected.weights[step:],
        losses=expected.losses[step:],
        rates=expected.rates[step:],
    )
    assert_same_training(resumed, tail)
    assert resumed.rates == tail.rates


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (3, 4), (4, 1)])
def test_C20_C29_C32_C33_a_run_stopped_within_an_epoch_goes_on_at_another_split(before, after, tmp_path):
    checkpoint = tmp_path / "stopped.ckpt"
    stopped = outcome_of(replace(SHUFFLED, split=SPLITS[before], steps=12, checkpoint=checkpoint))
    assert stopped.weights == straight().weights[:13]
    assert 12 % STEPS_OF_AN_EPOCH, "the stop is to be within an epoch"
    assert_continues(outcome_of(replace(SHUFFLED, split=SPLITS[after], resume=checkpoint)), straight(), 12)


@cache
def saved_inside(folder: Path) -> Path:
    """Checkpoints of a run that was not stopped, every 5 steps (the ends of its epochs) and every 4."""
    for every in (4, STEPS_OF_AN_EPOCH):
        outcome = outcome_of(
            replace(SHUFFLED, split=SPLITS[2], checkpoint=folder / str(every) / "last.ckpt", save_every=every)
        )
        assert outcome.weights == straight().weights, "saving must not change the training"
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("split", [SPLITS[1], SPLITS[3], Split(2, 6, 1)], ids=str)
@pytest.mark.parametrize(("every", "step"), [(4, 8), (5, 10)], ids=["within an epoch", "at an epoch's end"])
def test_C20_C21_a_run_goes_on_from_what_modelcheckpoint_saved_inside_training(split, every, step, folder):
    checkpoint = saved_inside(folder) / str(every) / f"step={step}.ckpt"
    assert_continues(outcome_of(replace(SHUFFLED, split=split, resume=checkpoint)), straight(), step)


def test_two_stops_in_one_epoch(tmp_path):
    checkpoints = [None, tmp_path / "first.ckpt", tmp_path / "second.ckpt", None]
    for ranks, steps, before, after in zip((2, 3, 1), (11, 13, 24), checkpoints, checkpoints[1:], strict=False):
        outcome = outcome_of(replace(SHUFFLED, split=SPLITS[ranks], steps=steps, resume=before, checkpoint=after))
    assert_continues(outcome, straight(), 13)


BY_EPOCH = replace(SHUFFLED, build=by_epoch)


@pytest.mark.parametrize("step", [12, 15])
def test_a_schedule_by_epochs_goes_on(step, tmp_path):
    checkpoint = tmp_path / "stopped.ckpt"
    outcome_of(replace(BY_EPOCH, split=SPLITS[3], steps=step, checkpoint=checkpoint))
    assert_continues(outcome_of(replace(BY_EPOCH, split=SPLITS[1], resume=checkpoint)), straight("BY_EPOCH"), step)
    assert len(set(straight("BY_EPOCH").rates)) > 1


@pytest.mark.parametrize("step", [12, 15])
def test_loaders_that_are_made_anew_each_epoch_go_on(step, tmp_path):
    reloading = replace(SHUFFLED, trainer={"reload_dataloaders_every_n_epochs": 1})
    checkpoint = tmp_path / "stopped.ckpt"
    stopped = outcome_of(replace(reloading, split=SPLITS[2], steps=step, checkpoint=checkpoint))
    assert stopped.weights == straight().weights[: step + 1]
    assert_continues(outcome_of(replace(reloading, split=SPLITS[1], resume=checkpoint)), straight(), step)


@pytest.mark.parametrize("limit", [-1, 100], ids=["limit of epochs", "limit of steps too"])
def test_no_epoch_is_lost_after_a_checkpoint_of_an_epochs_end(limit, tmp_path):
    epochs = replace(BY_EPOCH, split=SPLITS[1], steps=-1, trainer={"max_epochs": 4})
    every_epoch = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
    saving = {"max_epochs": 4, "enable_checkpointing": True}
    whole = outcome_of(replace(epochs, callbacks=(every_epoch,), trainer=saving))
    assert (whole.global_step, whole.epoch) == (20, 4)
    outcome_of(replace(epochs, trainer={"max_epochs": 2}, checkpoint=tmp_path / "after fit.ckpt"))
    for name in ("step=10.ckpt", "after fit.ckpt"):
        resumed = outcome_of(replace(epochs, steps=limit, split=SPLITS[2], resume=tmp_path / name))
        assert_continues(resumed, whole, 10)


def test_the_ledger_of_a_resumed_run_has_the_traces_of_the_run_that_was_not_stopped(tmp_path):
    checkpoint = tmp_path / "stopped.ckpt"
    outcome_of(replace(SHUFFLED, split=SPLITS[1], ledger=tmp_path / "straight"))
    outcome_of(replace(SHUFFLED, split=SPLITS[2], steps=12, ledger=tmp_path / "stopped", checkpoint=checkpoint))
    outcome_of(replace(SHUFFLED, split=SPLITS[3], ledger=tmp_path / "other", resume=checkpoint))
    outcome_of(replace(SHUFFLED, split=SPLITS[4], ledger=tmp_path / "stopped", resume=checkpoint))
    with (
        LedgerReader(tmp_path / "straight") as reference,
        LedgerReader(tmp_path / "other") as other,
        LedgerReader(tmp_path / "stopped") as continued,
    ):
        assert [each.step for each in continued.resumes] == [12]
        assert other.first_step == 13
        assert reference.last_step == other.last_step == continued.last_step == 24
        for step in range(25):
            assert continued.record(step).trace == reference.record(step).trace
            assert step <= 12 or other.record(step).trace == reference.record(step).trace
        assert continued.closed and other.closed
        assert continued.verify_chain().sound and other.verify_chain().sound


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": Split(2, 5, 1), "options": {"seed": 9}}, "global_batch = 12, this run has 10"),
        ({"options": {"global_batch": 12, "seed": 8}}, "seed = 9, this run has 8"),
        ({"samples": 57}, "samples = 58, this run has 57"),
        ({"loader": {"shuffle": False}}, "shuffle = True, this run has False"),
        ({"trainer": {"limit_train_batches": 3}}, "steps_per_epoch = 5, this run has 3"),
        ({"loader": {"shuffle": True, "drop_last": True}}, "drop_last = False, this run has True"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(change, said, folder):
    checkpoint = saved_inside(folder) / "4" / "step=8.ckpt"
    with pytest.raises(Failed) as failure:
        outcome_of(replace(SHUFFLED, resume=checkpoint, **{"split": SPLITS[1], **change}))
    assert failure.value.kind == "InputError"
    assert said in failure.value.message


def test_a_checkpoint_loads_with_weights_only(folder):
    checkpoint = torch.load(saved_inside(folder) / "4" / "step=8.ckpt", weights_only=True)
    assert checkpoint["det_lightning"]["global_batch"] == 12
    assert checkpoint["global_step"] == 8


class Within(Callback):
    """After two of three micro-batches of step 7: saves a checkpoint, or stops the fit."""

    def __init__(self, path: Path | None = None):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 6 and batch_idx % 3 == 1:
            if self.path is None:
                trainer.should_stop = True
            else:
                trainer.save_checkpoint(self.path)


def test_a_checkpoint_within_a_step_stands_before_it(tmp_path):
    saving = replace(SHUFFLED, split=SPLITS[2], callbacks=(Within(tmp_path / "within.ckpt"),))
    assert_same_training(outcome_of(saving), straight())
    for split in (SPLITS[3], SPLITS[1]):
        resumed = outcome_of(replace(SHUFFLED, split=split, resume=tmp_path / "within.ckpt"))
        assert_continues(resumed, straight(), 6)


def test_a_fit_that_is_stopped_within_a_step_goes_on_before_it(tmp_path):
    last = ModelCheckpoint(tmp_path, save_last=True)
    stopping = replace(
        SHUFFLED,
        split=SPLITS[2],
        callbacks=(Within(), last),
        trainer={"enable_checkpointing": True},
        checkpoint=tmp_path / "after fit.ckpt",
    )
    assert outcome_of(stopping).weights == straight().weights[:7]
    for name in ("last.ckpt", "after fit.ckpt"):
        resumed = outcome_of(replace(SHUFFLED, split=SPLITS[3], resume=tmp_path / name))
        assert_continues(resumed, straight(), 6)


def test_a_resumed_run_saves_every_few_steps_as_the_one_before(tmp_path):
    outcome_of(replace(SHUFFLED, split=SPLITS[2], steps=12, checkpoint=tmp_path / "stopped.ckpt"))
    saving = {"save_every": 4, "checkpoint": tmp_path / "second" / "last.ckpt"}
    resumed = outcome_of(replace(SHUFFLED, split=SPLITS[2], resume=tmp_path / "stopped.ckpt", **saving))
    assert_continues(resumed, straight(), 12)
    again = outcome_of(replace(SHUFFLED, split=SPLITS[1], resume=tmp_path / "second" / "step=16.ckpt"))
    assert_continues(again, straight(), 16)


class OneCycle(Network):
    """Asks how many steps there will be before a checkpoint's progress is restored."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StopAfter(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.parametrize("workers", [0, 1])
def test_a_schedule_over_the_whole_run_goes_on_within_an_epoch(workers, tmp_path):
    loader = {"shuffle": True, "num_workers": workers}
    cycle = replace(SHUFFLED, build=OneCycle, steps=-1, trainer={"max_epochs": 3}, loader=loader)
    whole = outcome_of(replace(cycle, split=SPLITS[1]))
    for step in (3, 7):
        path = tmp_path / f"{step}.ckpt"
        outcome_of(replace(cycle, split=SPLITS[2], callbacks=(StopAfter(step),), checkpoint=path))
        assert_continues(outcome_of(replace(cycle, split=SPLITS[3], resume=path)), whole, step)


def test_a_stock_checkpoint_is_taken_at_the_end_of_an_epoch_only(tmp_path):
    stock = Run(strategy="ddp", samples=48, split=Split(1, 12, 1))
    for steps in (3, 4):
        outcome_of(replace(stock, steps=steps, checkpoint=tmp_path / f"{steps}.ckpt"))
    with pytest.raises(Failed, match="within an epoch by another strategy"):
        outcome_of(Run(samples=48, split=SPLITS[1], steps=8, resume=tmp_path / "3.ckpt"))
    outcomes = [
        outcome_of(
            Run(samples=48, split=SPLITS[ranks], steps=8, resume=tmp_path / "4.ckpt", options={"global_batch": 12})
        )
        for ranks in (1, 3)
    ]
    assert_same_training(outcomes[1], outcomes[0])
    assert outcomes[0].global_step == 8


def test_C22_stock_ddp_with_three_ranks_fails_the_same_check(tmp_path):
    """It rebuilds its buckets after the first step of a process, and adds in another order from then on."""
    epochs = Run(strategy="ddp", steps=-1, trainer={"deterministic": True, "max_epochs": 6})
    for split, same in ((Split(1, 24, 1), True), (Split(3, 8, 1), False)):
        stock, checkpoint = replace(epochs, split=split), tmp_path / f"{split}.ckpt"
        whole = outcome_of(stock)
        outcome_of(replace(stock, trainer={"deterministic": True, "max_epochs": 3}, checkpoint=checkpoint))
        resumed = outcome_of(replace(stock, resume=checkpoint))
        assert resumed.weights[0] == whole.weights[12]
        assert (resumed.weights[-1] == whole.weights[-1]) == same
        first, second = (np.frombuffer(outcome.weights[-1], dtype=np.float32) for outcome in (resumed, whole))
        assert np.abs(first - second).max() < 1e-4, "only roundings differ"
