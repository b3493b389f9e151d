"""Buffers, weights, rates and what is trainable may change between two steps, and not between the micro-batches of one."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import UncoveredError
from tests.claims.trainings import FEATURES, HIDDEN, Network, Split
from tests.layers.fitting import fit


class Buffered(Network):
    """Activations times a buffer that training_step changes."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("level", torch.ones(2))

    def training_step(self, batch, batch_idx):
        self.change(self)
        return F.cross_entropy(self(batch[0]) * self.level[0], batch[1])


def counts(self):
    self.level += 0.5


def rebinds(self):
    self.level = self.level * 0.5


def fills(self):
    self.level.fill_(0.75)


def makes(self):
    if not hasattr(self, "cache"):
        self.register_buffer("cache", torch.full((2,), 0.75), persistent=False)
    self.level = self.cache


def once_a_step(self):
    if self.trainer.fit_loop.epoch_loop.batch_idx % self.trainer.accumulate_grad_batches == 0:
        self.level *= 0.5


@pytest.mark.parametrize("change", [counts, rebinds])
def test_a_buffer_that_every_micro_batch_changes_is_refused(change):
    with pytest.raises(UncoveredError, match="the buffer level was changed by two micro-batches of one step"):
        fit(lambda: Buffered(change), split=Split(1, 4, 3))
    assert len(set(fit(lambda: Buffered(change)).weights)) == 3


@pytest.mark.parametrize("change", [fills, makes, once_a_step])
def test_a_buffer_that_is_the_same_in_every_micro_batch_is_a_constant(change):
    assert fit(lambda: Buffered(change), split=Split(1, 4, 3)).weights == fit(lambda: Buffered(change)).weights


class Taught(Network):
    """A teacher follows the weights, and a rate falls, wherever `hook` says."""

    def __init__(self, hook: str, follow):
        super().__init__()
        self.teacher = torch.nn.Linear(FEATURES, HIDDEN).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.copy_(self.hidden.weight * 0.5)
            self.teacher.bias.copy_(self.hidden.bias)
        setattr(self, hook, lambda *args, **kwargs: follow(self))

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
        return F.cross_entropy(self(x), y) + F.mse_loss(self.hidden(x), target)


@torch.no_grad()
def average(self):
    for old, new in zip(self.teacher.parameters(), self.hidden.parameters(), strict=True):
        old.mul_(0.9).add_(new.detach() * 0.1)


def average_of_data(self):
    for old, new in zip(self.teacher.parameters(), self.hidden.parameters(), strict=True):
        old.data.mul_(0.9).add_(0.1 * new.detach().data)


@torch.no_grad()
def decay(self):
    self.hidden.weight.mul_(0.99)


def fall(self):
    for group in self.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.9


CHANGES = {
    average: r"the parameter teacher\.weight \(and 1 more\)",
    average_of_data: r"the parameter teacher\.weight \(and 1 more\)",
    decay: r"the parameter hidden\.weight",
    fall: r"the lr of SGD's parameter group 0",
}


@pytest.mark.parametrize(
    ("hook", "change"),
    [(hook, change) for hook in ("on_train_batch_end", "on_train_batch_start") for change in CHANGES]
    + [("on_after_backward", average_of_data), ("on_before_zero_grad", average_of_data)],
)
def test_state_that_changes_with_every_micro_batch_is_refused(hook, change):
    with pytest.raises(UncoveredError, match=rf"{CHANGES[change]} was changed between two micro-batches of one step"):
        fit(lambda: Taught(hook, change), split=Split(1, 4, 3))
    assert len(set(fit(lambda: Taught(hook, change)).weights)) == 3


@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changes_once_a_step_is_not(change):
    outcomes = [fit(lambda: Taught("on_before_optimizer_step", change), split=Split(1, 12 // n, n)) for n in (1, 3)]
    assert outcomes[0].weights == outcomes[1].weights


def test_a_teacher_that_every_training_step_moves_is_refused():
    class AtTheStart(Taught):
        def __init__(self):
            super().__init__("moves", average_of_data)

        def training_step(self, batch, batch_idx):
            self.moves()
            return super().training_step(batch, batch_idx)

    with pytest.raises(UncoveredError, match=r"teacher\.weight .* by two micro-batches of one step, to unlike values"):
        fit(AtTheStart, split=Split(1, 4, 3))


class Unfreezes(Network):
    def __init__(self, at: int):
        super().__init__()
        self.at = at
        self.hidden.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.hidden.requires_grad_(batch_idx >= self.at)


class Freezes(Network):
    def on_train_batch_start(self, batch, batch_idx):
        self.output.bias.requires_grad_(batch_idx % 3 != 2)


def test_a_parameter_that_is_frozen_within_a_step_is_named():
    with pytest.raises(UncoveredError, match=r"parameters output\.bias were frozen or unfrozen between two"):
        fit(Freezes, split=Split(1, 4, 3))


def test_a_layer_may_be_unfrozen_between_two_steps_and_not_within_one():
    split = Split(1, 4, 3)
    with pytest.raises(UncoveredError, match=r"hidden\.bias, hidden\.weight were frozen or unfrozen"):
        fit(lambda: Unfreezes(1), split=split)
    module = Unfreezes(3)
    before = module.hidden.weight.clone()
    three, one = fit(lambda: module, split=split), fit(lambda: Unfreezes(1))
    assert three.weights == one.weights and not torch.equal(before, module.hidden.weight)
    assert fit(lambda: Unfreezes(99)).weights[1] == one.weights[1] != one.weights[2]
