"""The promise: Lightning's GradientAccumulationScheduler cuts a given global batch anew from epoch to epoch, and moves no
bit; a step of another size would be another recipe, and is refused.
"""

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from det_lightning.errors import InputError
from det_lightning.strategies.given_ranks import free_port
from tests.claims.test_resume import assert_continues
from tests.claims.test_world_size import assert_same_training, trained
from tests.claims.trainings import Network, Run, Split, spread_samples, train

STEPS_OF_AN_EPOCH = 4  # 46 samples, 12 a step


def network() -> Network:
    return Network(schedule="epoch")


RUN = Run(
    split=Split(1, 12, 1),
    samples=46,
    steps=14,
    build=network,
    loader={"shuffle": True},
    options={"global_batch": 12},
)


def scheduled(run: Run, scheduling: dict[int, int]) -> Run:
    return replace(run, callbacks=(GradientAccumulationScheduler(scheduling),))


@cache
def plain():
    return trained(RUN)


@pytest.mark.parametrize(
    ("world_size", "scheduling", "change"),
    [
        (1, {1: 2, 2: 5, 3: 1}, {}),
        (2, {0: 3, 1: 1, 2: 4}, {}),
        (2, {0: 1, 1: 2}, {"trainer": {"val_check_interval": 0.5, "limit_val_batches": 1}, "validation": 5}),
        (1, {0: 1, 2: 3}, {"trainer": {"reload_dataloaders_every_n_epochs": 2}}),
    ],
)
def test_accumulation_that_changes_between_epochs_moves_no_bit(world_size, scheduling, change):
    run = replace(RUN, split=Split(world_size, 1, 1), **change)
    assert_same_training(trained(scheduled(run, scheduling)), plain())


class Counting(Callback):
    """Batches of each epoch."""

    counts: ClassVar[list[int]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.counts.append(trainer.fit_loop.epoch_loop.batch_idx + 1)


def test_the_epochs_have_as_many_batches_as_the_schedule_says():
    run = scheduled(replace(RUN, steps=16), {1: 2, 2: 5, 3: 1})
    train(0, 1, free_port(), replace(run, callbacks=(*run.callbacks, Counting())))
    assert Counting.counts == [STEPS_OF_AN_EPOCH * accumulate for accumulate in (1, 2, 5, 1)]


@pytest.mark.parametrize("stop", [6, 8])
@pytest.mark.parametrize(
    ("before", "after"), [({0: 3, 1: 2}, {0: 2, 1: 4, 2: 1}), ({0: 1}, {1: 3}), ({0: 2, 1: 3}, {0: 1})]
)
def test_a_run_goes_on_under_another_schedule(tmp_path, before, after, stop):
    stopped = replace(RUN, steps=stop, checkpoint=tmp_path / "stopped.ckpt")
    trained(scheduled(replace(stopped, split=Split(2, 1, 1)), before))
    resumed = trained(scheduled(replace(RUN, resume=tmp_path / "stopped.ckpt"), after))
    assert_continues(resumed, plain(), stop)


def test_stock_ddp_takes_larger_steps_so_it_ends_elsewhere():
    run = replace(RUN, strategy="ddp", options={}, loader={})
    assert trained(scheduled(run, {0: 2})).weights[1] != trained(run).weights[1]


class Batches(BatchSampler):
    """Batches of a user's own."""


def test_a_batch_sampler_says_itself_how_large_a_step_is():
    data = spread_samples(46)
    loader = DataLoader(data, batch_sampler=Batches(RandomSampler(data), 12, False))
    run = replace(RUN, options={}, loader={}, loaders=loader)
    expected = train(0, 1, free_port(), run)
    assert_same_training(train(0, 1, free_port(), scheduled(run, {0: 2, 1: 3})), expected)


def test_one_factor_from_the_first_epoch_on_is_accumulation_as_usual():
    run = replace(RUN, options={}, split=Split(1, 4, 1))
    assert_same_training(train(0, 1, free_port(), scheduled(run, {0: 3})), plain())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {}}, "change the global batch from 12 samples to 48 .world size 1 x batch_size 12"),
        ({"trainer": {"limit_train_batches": 4}}, "limit_train_batches=4 counts micro-batches"),
    ],
)
def test_what_would_change_the_size_of_a_step_or_of_an_epoch_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        train(0, 1, free_port(), scheduled(replace(RUN, **change), {2: 4}))
