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
