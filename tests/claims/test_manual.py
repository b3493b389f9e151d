"""Manual optimization: several optimizers, losses and backward passes in a step, the same bytes at every world size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from det_lightning.replay.run import QUIET_TRAINER
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.test_resume import assert_continues
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import FEATURES, HIDDEN, Network, Run, Split, bytes_of, spread_samples, train

from det_lightning.ops.random_calls import random  # isort: skip


class Adversarial(Network):
    """A generator and a discriminator that take turns, as in the documentation of Lightning."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        generator = torch.Generator().manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
        self.judge = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, 1))
        with torch.no_grad():
            for parameter in [*self.generator.parameters(), *self.judge.parameters()]:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def says(self, x, real: bool):
        verdict = self.judge(x)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(random.randn_like(x[:, :4]))
        self.toggle_optimizer(first)
        loss = self.says(fake, True) + 1e-3 * self.generator[0].weight.pow(2).sum()
        self.log("generator", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(0.5 * self.says(x, True))
        self.manual_backward(0.5 * self.says(fake.detach(), False))  # added to the gradients of the one before
        self.clip_gradients(second, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.judge.parameters(), lr=0.05, momentum=0.5)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (first, second)]


RUN = Run(
    split=Split(1, 12, 1),
    steps=12,  # two a batch
    samples=44,
    build=Adversarial,
    loader={"shuffle": True},
    options={"global_batch": 12, "seed": 3},
    trainer={"gradient_clip_val": None},
)


def here(run: Run):
    return train(0, 1, free_port(), run)


@pytest.mark.parametrize("split", [Split(2, 1, 1), Split(3, 1, 1)], ids=str)
def test_two_optimizers_that_take_turns_give_the_same_bytes(split):
    outcome, expected = on_ranks(split.world_size, train, replace(RUN, split=split))[0], here(RUN)
    assert_same_training(outcome, expected)
    assert outcome.logged == expected.logged and "generator_epoch" in expected.logged
    assert len(set(expected.weights)) == 7


def test_it_is_the_stock_training_up_to_rounding():
    """Without random numbers, which are drawn otherwise."""

    class Plain(Adversarial):
        def training_step(self, batch, batch_idx):
            global random
            drawn, random = random, type("Fixed", (), {"randn_like": staticmethod(lambda x: x * 0.5)})
            try:
                return super().training_step(batch, batch_idx)
            finally:
                random = drawn

        def __init__(self):
            super().__init__()
            self.judge[2] = nn.Identity()

    ours = here(replace(RUN, build=Plain, loader={}, options={}, samples=48))
    module = Plain()
    start = bytes_of(module)
    trainer = Trainer(accelerator="cpu", devices=1, strategy="auto", max_steps=12, max_epochs=-1, **QUIET_TRAINER)
    trainer.fit(module, DataLoader(spread_samples(48), batch_size=12))
    a, b, start = (np.frombuffer(w, dtype=np.float32) for w in (ours.weights[-1], bytes_of(module), start))
    assert np.abs(a - b).max() < 1e-4 < 1e-2 < np.abs(b - start).max()


def test_it_goes_on_where_it_was_stopped(tmp_path):
    here(replace(RUN, steps=6, checkpoint=tmp_path / "stopped.ckpt"))
    resumed = on_ranks(2, train, replace(RUN, split=Split(2, 1, 1), resume=tmp_path / "stopped.ckpt"))[0]
    assert_continues(resumed, here(RUN), 3)


def test_backward_outside_a_step_and_a_loss_that_is_no_mean_are_refused():
    class Late(Adversarial):
        def training_step(self, batch, batch_idx):
            self.kept = self.says(batch[0], True)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.manual_backward(self.kept)

    class Direct(Adversarial):
        def training_step(self, batch, batch_idx):
            self.says(batch[0], True).backward()

    for build, message in ((Late, "outside training_step"), (Direct, "random|backward")):
        with pytest.raises(Exception, match=message):
            here(replace(RUN, build=build))
