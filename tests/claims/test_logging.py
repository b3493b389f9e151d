"""Logged values are the same bytes at every split, and whatever acts on them moves no bit of the training.

Cases C39, C40 and the open report that an epoch's mean truncates its counts.
"""

from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import Accuracy

from det_lightning.ops.means import exact_mean
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.trainings import CLASSES, Network, Run, Split, spread_samples, train
from tests.ops.exact_oracle import rounded

SPLITS = [Split(1, 12, 1), Split(1, 3, 4), Split(2, 3, 2), Split(3, 4, 1)]


class Logs(Network):
    """Logs in each of the ways that people log; the rate follows an epoch's mean of the training loss."""

    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES, average="micro")
        self.items = []  # the losses and classes of every micro-batch

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        both = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, **both)
        self.log("scaled", 0.1 * loss.detach() + 1.5, **both)
        self.log("right", (logits.argmax(1) == y).float().mean(), **both)
        losses = F.cross_entropy(logits, y, reduction="none")
        self.items.append((losses.detach(), y))
        self.log("of some", exact_mean(losses, y > 1), **both)
        self.log("summed", F.cross_entropy(logits, y, reduction="sum"), reduce_fx="sum", **both)
        self.log("count", float(len(x)), reduce_fx="sum", **both)
        self.log("largest", losses.detach().max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("constant", 0.1, **both)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("validation loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("share", (y > 2).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


class Watch(Callback):
    """Keeps what was logged at every step and at the end of every epoch, and the items of every micro-batch."""

    def __init__(self):
        self.steps, self.epochs, self.done = [], [], 0
        self.items: list[tuple[list[float], list[int]]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.items += [tuple(each.tolist() for each in pl_module.items.pop())]
        if trainer.global_step != self.done:
            self.done = trainer.global_step
            names = sorted(name for name in trainer.logged_metrics if name.endswith("_step"))
            self.steps.append({name: float(trainer.logged_metrics[name]).hex() for name in names})

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append({name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())})


RUN = Run(
    steps=-1, samples=43, build=Logs, validation=13, loader={"shuffle": True}, options={"global_batch": 12, "seed": 2}
)
TRAINER = {"max_epochs": 3, "log_every_n_steps": 1}


def watched(rank, world_size, port, run: Run):
    watch = Watch()
    outcome = train(rank, world_size, port, replace(run, callbacks=(*run.callbacks, watch)))
    return outcome, watch.steps, watch.epochs, watch.items


@cache
def at(split: Split):
    return on_ranks(split.world_size, watched, replace(RUN, split=split, trainer=TRAINER))[0]


@pytest.mark.parametrize("split", [*SPLITS[1:3], pytest.param(SPLITS[3], marks=pytest.mark.slow)], ids=str)
def test_C39_C40_every_logged_value_is_the_same_at_every_split(split):
    outcome, steps, epochs, _ = at(split)
    expected, expected_steps, expected_epochs, _ = at(SPLITS[0])
    assert epochs == expected_epochs and len(epochs) == 3
    assert steps == expected_steps and len(steps) == 12
    assert outcome.weights == expected.weights
    assert outcome.rates == expected.rates


def over(items: list[float], denominator: int = 1) -> np.float32:
    """Their exact sum over the denominator, rounded once."""
    return np.uint32(rounded(items, torch.float32, denominator)).view(np.float32)


def expected_of(losses: list[float], classes: list[int]) -> dict[str, np.float32]:
    mean, some = over(losses, len(losses)), [loss for loss, y in zip(losses, classes, strict=True) if y > 1]
    return {
        "loss": mean,
        "scaled": np.float32(0.1) * mean + np.float32(1.5),
        "of some": over(some, len(some)),
        "summed": over(losses),
        "count": np.float32(len(losses)),
        "constant": np.float32(0.1),
    }


def test_they_are_what_they_are_named():
    """43 samples in steps of 12, 12, 12 and 7: an epoch's mean is over samples, not over steps, and rounded once."""
    outcome, steps, epochs, items = at(SPLITS[0])
    assert len(set(outcome.rates)) > 1, "the plateau is reached"
    assert [len(losses) for losses, _ in items] == [12, 12, 12, 7] * 3
    for first, epoch in zip((0, 4, 8), epochs, strict=True):
        values = {name: float.fromhex(value) for name, value in epoch.items()}
        losses, classes = ([*chain(*part)] for part in zip(*items[first : first + 4], strict=True))
        for name, value in expected_of(losses, classes).items():
            assert values[f"{name}_epoch"] == value, name
        assert values["largest"] == max(losses)
        assert values["right_epoch"] == np.float32(round(values["right_epoch"] * 43) / 43)
        assert values["accuracy"] == np.float32(round(values["accuracy"] * 13) / 13)
        assert values["share"] == np.float32(float((spread_samples(13).tensors[1] > 2).sum()) / 13)
    for step, of_step, loss in zip(steps, items, outcome.losses, strict=True):
        for name, value in expected_of(*of_step).items():
            assert float.fromhex(step[f"{name}_step"]) == value, name
        assert float.fromhex(step["loss_step"]) == np.frombuffer(loss, np.float32)[0], "of the global batch"


def test_step_losses_added_up_in_float32_fail_the_same_check():
    _, _, epochs, items = at(SPLITS[0])
    found = [float.fromhex(epoch["loss_epoch"]) for epoch in epochs]
    weighted = [over(losses, len(losses)) * np.float32(len(losses)) for losses, _ in items]
    means = [float(sum(weighted[first : first + 4], np.float32(0)) / np.float32(43)) for first in (0, 4, 8)]
    assert found != means and found == pytest.approx(means, rel=1e-6)


def test_stock_logging_fails_the_same_check():
    stock = {"strategy": "ddp", "options": {}, "samples": 48}
    one, two = (on_ranks(1, watched, replace(RUN, split=split, trainer=TRAINER, **stock))[0] for split in SPLITS[:2])
    assert one[1][0]["loss_step"] != two[1][0]["loss_step"]
    assert [epoch["loss_epoch"] for epoch in one[2]] != [epoch["loss_epoch"] for epoch in two[2]]


def test_an_epoch_that_is_interrupted_keeps_what_was_logged(tmp_path):
    """The plateau looks at the whole epoch's mean, also after a resume within it at another split."""
    expected, _, expected_epochs, _ = at(SPLITS[0])
    saving = replace(RUN, split=SPLITS[2], trainer=TRAINER, save_every=6, checkpoint=tmp_path / "last.ckpt")
    assert on_ranks(2, watched, saving)[0][2] == expected_epochs
    state = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["det_lightning"]["logged"]
    assert (state["epoch"], state["step"]) == (1, 2) and state["sums"]
    for split in (SPLITS[1], SPLITS[2]):
        resume = replace(RUN, split=split, trainer=TRAINER, resume=tmp_path / "step=6.ckpt")
        outcome, _, epochs, _ = on_ranks(split.world_size, watched, resume)[0]
        assert epochs == expected_epochs[1:]
        assert outcome.weights == expected.weights[6:]
        assert outcome.rates == expected.rates[6:]


@pytest.mark.parametrize("at_the_end", [True, False], ids=["of the epoch", "of validation"])
def test_a_checkpoint_at_an_epochs_end_does_not_lose_the_look_of_the_plateau(tmp_path, at_the_end):
    """Lightning saves before ReduceLROnPlateau looks at the epoch."""
    expected, _, expected_epochs, _ = at(SPLITS[0])
    assert len(set(expected.rates)) > 1, "the plateau is reached"
    trainer = {**TRAINER, "enable_checkpointing": True}
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=at_the_end)
    whole = on_ranks(2, watched, replace(RUN, split=SPLITS[2], trainer=trainer, callbacks=(saving,)))[0]
    assert (whole[0].rates, whole[2]) == (expected.rates, expected_epochs)
    for steps, split in ((4, SPLITS[1]), (8, SPLITS[0]), (4, SPLITS[2])):
        resume = replace(RUN, split=split, trainer=TRAINER, resume=tmp_path / f"step={steps}.ckpt")
        outcome, _, epochs, _ = on_ranks(split.world_size, watched, resume)[0]
        assert outcome.rates == expected.rates[steps:]
        assert outcome.weights == expected.weights[steps:]
        assert epochs[-1] == expected_epochs[-1]


class FollowsEachStep(Logs):
    def configure_optimizers(self):
        configured = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            configured["optimizer"], factor=0.9, patience=0, threshold=0.5
        )
        return configured | {"lr_scheduler": {"scheduler": plateau, "monitor": "loss_step", "interval": "step"}}


def test_a_checkpoint_after_a_step_does_not_lose_the_look_of_the_plateau(tmp_path):
    run = replace(RUN, build=FollowsEachStep, trainer=TRAINER)
    expected = on_ranks(1, watched, replace(run, split=SPLITS[0]))[0][0]
    assert len(set(expected.rates)) > 6, "it looks at each step"
    saving = replace(run, split=SPLITS[1], save_every=2, checkpoint=tmp_path / "last.ckpt")
    assert on_ranks(1, watched, saving)[0][0].rates == expected.rates
    for steps in (4, 6):  # the end of an epoch, and the middle of one
        resume = replace(run, split=SPLITS[0], resume=tmp_path / f"step={steps}.ckpt")
        outcome = on_ranks(1, watched, resume)[0][0]
        assert (outcome.rates, outcome.weights) == (expected.rates[steps:], expected.weights[steps:])


class SavesWithinAStep(Callback):
    """After the first micro-batch of the seventh step, which is the third of its epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 6 and batch_idx % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_within_a_step_keeps_what_was_logged_before_it(tmp_path):
    expected, _, expected_epochs, _ = at(SPLITS[0])
    split = next(split for split in SPLITS if split.world_size > 1 and split.accumulate > 1)
    callbacks = (SavesWithinAStep(tmp_path / "within.ckpt"),)
    saved = on_ranks(split.world_size, watched, replace(RUN, split=split, trainer=TRAINER, callbacks=callbacks))[0]
    assert saved[2] == expected_epochs
    resume = replace(RUN, split=SPLITS[0], trainer=TRAINER, resume=callbacks[0].path)
    outcome, _, epochs, _ = on_ranks(1, watched, resume)[0]
    assert epochs == expected_epochs[1:]
    assert (outcome.weights, outcome.rates) == (expected.weights[6:], expected.rates[6:])


def test_early_stopping_and_the_best_checkpoint_do_not_depend_on_the_split(tmp_path):
    found = []
    for split in (SPLITS[0], SPLITS[2]):
        folder = tmp_path / str(split)
        callbacks = (
            EarlyStopping("loss_epoch", patience=1, min_delta=0.3, check_on_train_epoch_end=True),
            ModelCheckpoint(folder, monitor="validation loss", save_top_k=1, filename="{step}-{validation loss:.9f}"),
        )
        trainer = {"max_epochs": 9, "enable_checkpointing": True}
        outcome = on_ranks(split.world_size, train, replace(RUN, split=split, trainer=trainer, callbacks=callbacks))[0]
        found.append((outcome.global_step, outcome.weights[-1], [file.name for file in folder.iterdir()]))
    assert found[0] == found[1]
    assert found[0][0] < 9 * 4


def test_a_name_for_unlike_values_is_refused():
    class Unlike(Network):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            other = loss + F.cross_entropy(self(batch[0]) * 2.0, batch[1])
            self.log("loss", loss if batch_idx else other, on_epoch=True)
            return loss

    with pytest.raises(Exception, match=r"self\.log\('loss', \.\.\.\) was called with a value made of 2 means before"):
        train(0, 1, free_port(), Run(split=SPLITS[0], build=Unlike, steps=2, samples=24))
