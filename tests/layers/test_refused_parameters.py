"""Uses of parameters whose gradient could not be one exact sum are refused by name, with the line to write."""

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from det_lightning.errors import UncoveredError
from tests.claims.trainings import CLASSES, FEATURES, HIDDEN, Network, Split
from tests.layers.fitting import Scaled, fit, loss_of, network

PARAMETER_USES = {
    "sin": lambda self, x, h, y: torch.sin(self.scale),
    "softmax": lambda self, x, h, y: self.scale.softmax(0),
    "einsum": lambda self, x, h, y: torch.einsum("ij,j->i", h, self.scale),
    "cat": lambda self, x, h, y: torch.cat([h, self.scale.unsqueeze(0)]),
    "where": lambda self, x, h, y: torch.where(h > 0, h, self.scale),
    "getitem": lambda self, x, h, y: self.table[y],
    "embedding": lambda self, x, h, y: F.embedding(y, self.table),
    "setitem": lambda self, x, h, y: h.new_zeros(12, HIDDEN).__setitem__(0, self.scale),
    "setitem, into a copy": lambda self, x, h, y: self.scale.clone().__setitem__(0, 0.0),
    "add, with alpha": lambda self, x, h, y: torch.add(h, self.scale, alpha=0.5),
    "expand": lambda self, x, h, y: self.scale.expand(3, HIDDEN),
    "repeat": lambda self, x, h, y: self.scale.repeat(12, 2),
    "mul": lambda self, x, h, y: h[:, :CLASSES] * self.table,
    "sub": lambda self, x, h, y: h[0, :CLASSES] - self.table,
    "div": lambda self, x, h, y: h[:1, :CLASSES] / self.table,
    "rand_like": lambda self, x, h, y: torch.rand_like(self.scale),
    "dropout": lambda self, x, h, y: F.dropout(self.scale, 0.1),
    "register_hook": lambda self, x, h, y: self.scale.register_hook(lambda g: g * 2),
    "backward": lambda self, x, h, y: self.scale.sum().backward(),
}


@pytest.mark.parametrize("use", PARAMETER_USES)
def test_a_use_of_a_parameter_that_is_not_covered_is_refused_with_the_line_to_write(use):
    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.hidden(x)
        PARAMETER_USES[use](self, x, h, y)
        return F.cross_entropy(self.output(h), y)

    build = type("Scaling", (Scaled,), {"training_step": training_step})
    name = use.partition(",")[0]
    with pytest.raises(
        UncoveredError, match=rf"{name}.*, called in .*(Write|Covered|Return|change \.grad|bring them there)"
    ) as refusal:
        fit(build)
    assert ("F.one_hot(index" in str(refusal.value)) == (use in ("getitem", "embedding"))
    if name not in ("rand_like", "dropout", "register_hook", "backward"):
        assert re.search(r"parameter (scale|table)\b", str(refusal.value))


def test_a_weight_that_is_made_of_samples_is_refused():
    def training_step(self, batch, batch_idx):
        h = self.hidden(batch[0])
        return F.cross_entropy(F.linear(h, h[:CLASSES]), batch[1])

    with pytest.raises(UncoveredError, match="linear with a weight that is computed from samples"):
        fit(network(training_step))


def test_a_function_of_parameters_that_changes_within_a_step_is_found():
    """A buffer that moves with every micro-batch is no constant of the step."""

    class Counting(Scaled):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.ones(()))

        def training_step(self, batch, batch_idx):
            self.count += 1.0
            return F.cross_entropy(self.output(self.hidden(batch[0]) * (self.scale * self.count)), batch[1])

    assert fit(Counting).weights
    with pytest.raises(
        UncoveredError, match="a function of scale has other values, or another place, than in the micro-batch"
    ):
        fit(Counting, split=Split(1, 4, 3))


def test_functions_of_parameters_that_differ_between_micro_batches_are_refused():
    def training_step(self, batch, batch_idx):
        h = self.hidden(batch[0])
        h = h * self.scale.exp() if batch_idx % 3 < 2 else h
        return F.cross_entropy(self.output(h), batch[1])

    build = type("Branching", (Scaled,), {"training_step": training_step})
    with pytest.raises(UncoveredError, match="micro-batches of one step made their losses unlike"):
        fit(build, split=Split(1, 4, 3))


@pytest.mark.parametrize("use", ["as logits", "as input of a linear layer"])
def test_a_gradient_that_was_rounded_before_the_global_sum_is_found_and_named(use):
    def training_step(self, batch, batch_idx):
        _x, y = batch
        if use == "as logits":
            return F.cross_entropy(self.table, y)
        return F.cross_entropy(F.linear(self.table, torch.eye(CLASSES) * 2), y)

    build = type("Rounding", (Scaled,), {"training_step": training_step})
    with pytest.raises(UncoveredError, match="the parameter table received a gradient that was already summed"):
        fit(build)


def test_a_trainable_weight_that_is_not_in_the_model_is_refused():
    outside = nn.Parameter(torch.ones(CLASSES, FEATURES))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(F.linear(batch[0], outside), batch[1])

    with pytest.raises(UncoveredError, match=r"shape \(5, 12\) that is not in the model"):
        fit(network(training_step))


def test_gradient_hooks_are_refused_wherever_they_come_from():
    class LateHook(Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.hidden.weight.register_hook(lambda g: g * 0)

    class EarlyHook(Network):
        def __init__(self):
            super().__init__()
            self.output.bias.register_post_accumulate_grad_hook(lambda p: None)

    class ModuleHook(Network):
        def __init__(self):
            super().__init__()
            self.hidden.register_full_backward_hook(lambda module, before, after: None)

    with pytest.raises(UncoveredError, match=r"the parameter hidden\.weight has a gradient hook"):
        fit(Network, callbacks=(LateHook(),))
    with pytest.raises(UncoveredError, match=r"the parameter output\.bias has a gradient hook"):
        fit(EarlyHook)
    with pytest.raises(UncoveredError, match="the module hidden has a backward hook"):
        fit(ModuleHook)


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


def once_at_the_start_anew(self):
    if self.trainer.fit_loop.epoch_loop.batch_idx % self.trainer.accumulate_grad_batches == 0:
        self.level = self.level * 0.5


@pytest.mark.parametrize("change", [counts, rebinds])
def test_a_buffer_that_every_micro_batch_changes_is_refused(change):
    with pytest.raises(UncoveredError, match="the buffer level was changed by two micro-batches of one step"):
        fit(lambda: Buffered(change), split=Split(1, 4, 3))
    assert len(set(fit(lambda: Buffered(change)).weights)) == 3


@pytest.mark.parametrize("change", [fills, makes, once_a_step, once_at_the_start_anew])
def test_a_buffer_that_is_the_same_in_every_micro_batch_is_a_constant(change):
    assert fit(lambda: Buffered(change), split=Split(1, 4, 3)).weights == fit(lambda: Buffered(change)).weights


class ChangedAtTheEnd(Network):
    """What `change` leaves is the same after every micro-batch of a step; the step's first one began with another value."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("level", torch.ones(2))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0] * self.level[0]), batch[1])
        self.change(self)
        return loss


def anneals(self):
    self.level.fill_(1 / (2 + self.global_step))


def anneals_anew(self):
    self.level = torch.full((2,), 1 / (2 + self.global_step))


def anneals_data(self):
    self.level.data.copy_(torch.full((2,), 1 / (2 + self.global_step)))


def anneals_a_part(self):
    self.level[0] = 1 / (2 + self.global_step)


def projects(self):
    self.hidden.weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("change", "name"),
    [(f, "buffer level") for f in (anneals, anneals_anew, anneals_data, anneals_a_part)]
    + [(projects, r"parameter hidden\.weight")],
)
def test_state_that_the_first_micro_batch_changes_after_using_it_is_refused(change, name):
    with pytest.raises(UncoveredError, match=rf"the {name} was changed by a micro-batch that had used it"):
        fit(lambda: ChangedAtTheEnd(change), split=Split(1, 4, 3))
    assert len(set(fit(lambda: ChangedAtTheEnd(change)).weights)) == 3


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


def test_a_parameter_that_is_frozen_within_a_step_is_named():
    with pytest.raises(UncoveredError, match=r"parameters output\.bias were frozen or unfrozen between two"):
        fit(Freezes, split=Split(1, 4, 3))


@pytest.mark.parametrize("option", [{"create_graph": True}, {"inputs": []}, {"gradient": torch.ones(())}])
def test_manual_backward_with_more_than_retain_graph_is_refused(option):
    class ByHand(Network):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(loss_of(self, batch), retain_graph=False, **option)

    with pytest.raises(UncoveredError, match=rf"with {next(iter(option))}: covered is retain_graph"):
        fit(ByHand, trainer={"gradient_clip_val": None})


def test_a_layer_may_be_unfrozen_between_two_steps_and_not_within_one():
    split = Split(1, 4, 3)
    with pytest.raises(UncoveredError, match=r"hidden\.bias, hidden\.weight were frozen or unfrozen"):
        fit(lambda: Unfreezes(1), split=split)
    module = Unfreezes(3)
    before = module.hidden.weight.clone()
    three, one = fit(lambda: module, split=split), fit(lambda: Unfreezes(1))
    assert three.weights == one.weights and not torch.equal(before, module.hidden.weight)
    assert fit(lambda: Unfreezes(99)).weights[1] == one.weights[1] != one.weights[2]
