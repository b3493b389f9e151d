"""Calls without a contract are refused with the module and the line; so are steps of the graph that no call shows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled

from det_lightning.errors import UncoveredError
from tests.claims.trainings import HIDDEN, Network, Split
from tests.layers.fitting import fit, loss_of, network

CALLS = {
    "sigmoid": lambda self, x, h: torch.sigmoid(h),
    "softmax": lambda self, x, h: h.softmax(1),
    "matmul": lambda self, x, h: h @ h.t(),
    "sum": lambda self, x, h: h.sum(1),
    "exp": lambda self, x, h: h.detach().exp(),
    "pow": lambda self, x, h: h**2,
    "max": lambda self, x, h: h.max(1).values,
    "clamp": lambda self, x, h: h.clamp(0, 1),
    "gather": lambda self, x, h: h.gather(1, torch.zeros(12, 1, dtype=torch.int64)),
    "getitem": lambda self, x, h: h[torch.tensor([0, 0])],
    "index_add": lambda self, x, h: h.index_add(0, torch.tensor([0]), h[:1]),
    "einsum": lambda self, x, h: torch.einsum("ij,kj->ik", h, h),
    "normalize": lambda self, x, h: F.normalize(h),
    "poisson_nll_loss": lambda self, x, h: F.poisson_nll_loss(h, h.detach()),
    "log_softmax": lambda self, x, h: F.log_softmax(h, dim=1, dtype=torch.float64),
    "empty": lambda self, x, h: torch.empty(3),
    "linspace": lambda self, x, h: torch.linspace(0, 1, 3),
    "cumsum": lambda self, x, h: x.cumsum(0),
    "randn": lambda self, x, h: torch.randn(3),
    "rand_like": lambda self, x, h: torch.rand_like(x, dtype=torch.float64),
    "normal": lambda self, x, h: x.clone().normal_(),
    "alpha_dropout": lambda self, x, h: F.alpha_dropout(h, 0.1, training=True),
    "backward": lambda self, x, h: h.mean().backward(),
    "grad": lambda self, x, h: torch.autograd.grad(h[0, 0], h),
    "register_hook": lambda self, x, h: h.register_hook(lambda g: g * 2),
    "fft_rfft": lambda self, x, h: torch.fft.rfft(x),
    "aten.mm": lambda self, x, h: torch.ops.aten.mm(h, h.t()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_contract_is_refused_with_the_module_and_the_line(name):
    def training_step(self, batch, batch_idx):
        CALLS[name](self, batch[0], self(batch[0]))
        return loss_of(self, batch)

    with pytest.raises(UncoveredError) as refusal:
        fit(network(training_step))
    message = str(refusal.value)
    assert name.rpartition(".")[2] in message
    assert "called in the LightningModule itself (Network." in message and ", line " in message


def test_a_call_in_a_submodule_is_refused_by_that_modules_path():
    class Gate(nn.Module):
        def forward(self, x):
            return x * torch.tanh(x)

    class Gated(Network):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList([nn.ReLU(), Gate()])

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.output(self.gates[1](self.hidden(x))), y)

    with pytest.raises(UncoveredError, match=r"tanh, called in module 'gates\.1' \(Gate\.forward, line \d+\)"):
        fit(Gated)


BROADCASTS = {
    "add": lambda h: h + h[:, :1],
    "sub": lambda h: h[:1] - h.detach(),
    "mul": lambda h: h * h[0, 0],
    "setitem": lambda h: h.new_zeros(12, HIDDEN).__setitem__(slice(None), h[:1]),
    "setitem with indices": lambda h: h.new_zeros(12, HIDDEN).__setitem__(torch.arange(12), h),
    "expand": lambda h: h[:1].expand(12, HIDDEN),
    "where": lambda h: torch.where(h > 0, h, h[:, :1]),
    "add with alpha": lambda h: torch.add(h, h, alpha=0.5),
    "div, floored": lambda h: torch.div(h, 2.0, rounding_mode="floor"),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_a_gradient_through_a_broadcast_is_refused(name):
    def training_step(self, batch, batch_idx):
        BROADCASTS[name](self.hidden(batch[0]))
        return loss_of(self, batch)

    with pytest.raises(UncoveredError, match=name.partition(" ")[0].rstrip(",")):
        fit(network(training_step))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g.sum(0).expand_as(g)


def test_an_autograd_function_of_the_users_own_is_refused_by_name():
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.output(Doubled.apply(self.hidden(batch[0]))), batch[1])

    with pytest.raises(UncoveredError, match=r"test_refused_calls\.Doubled is an autograd function"):
        fit(network(training_step))


def test_what_calls_do_not_show_is_seen_in_the_graph_of_the_loss():
    def training_step(self, batch, batch_idx):
        h = self.hidden(batch[0])
        with torch._C.DisableTorchFunction():
            h = h * torch.sigmoid(h)
        return F.cross_entropy(self.output(h), batch[1])

    with pytest.raises(UncoveredError, match=r"goes through SigmoidBackward0.* where calls cannot be seen"):
        fit(network(training_step))


def test_autocast_to_float16_is_refused():
    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", dtype=torch.float16):
            return loss_of(self, batch)

    with pytest.raises(UncoveredError, match=r"torch\.autocast to torch\.float16.*bf16-mixed"):
        fit(network(training_step))


def test_reentrant_checkpointing_and_other_hooks_on_saved_tensors_are_refused():
    def reentrant(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.output(checkpoint(self.hidden, x, use_reentrant=True)), y)

    def packing(self, batch, batch_idx):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return loss_of(self, batch)

    with pytest.raises(UncoveredError, match="use_reentrant=False"):
        fit(network(reentrant))
    with pytest.raises(RuntimeError, match="does not cover hooks on saved tensors other than activation checkpointing"):
        fit(network(packing))
    assert torch.utils.checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"


@pytest.mark.parametrize(
    "step",
    [
        lambda self, x: torch.func.vmap(lambda row: self(row[None])[0])(x),
        lambda self, x: self(x + torch.func.grad(lambda x: self(x).sum())(x)),
    ],
)
def test_a_transform_of_torch_func_is_refused_by_name(step):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(step(self, batch[0]), batch[1])

    with pytest.raises(UncoveredError, match=r"within a transform of torch\.func .*functional_call is covered"):
        fit(network(training_step))


def test_functional_call_is_covered():
    def training_step(self, batch, batch_idx):
        halves = {name: value * 0.5 for name, value in self.hidden.named_parameters()}
        h = torch.func.functional_call(self.hidden, halves, (batch[0],))
        return F.cross_entropy(self.output(F.relu(h)), batch[1])

    one, three = (fit(network(training_step), split=split).weights for split in (Split(1, 12, 1), Split(1, 4, 3)))
    assert one == three and len(set(one)) == 3


def test_the_debug_mode_of_activation_checkpointing_is_refused_by_name():
    def training_step(self, batch, batch_idx):
        h = checkpoint(self.hidden, batch[0], use_reentrant=False, debug=True)
        return F.cross_entropy(self.output(F.relu(h)), batch[1])

    with pytest.raises(UncoveredError, match="debug"):
        fit(network(training_step))

    def set_for_all(self, batch, batch_idx):
        with set_checkpoint_debug_enabled(True):
            h = checkpoint(self.hidden, batch[0], use_reentrant=False)
        return F.cross_entropy(self.output(F.relu(h)), batch[1])

    with pytest.raises(UncoveredError, match="debug"):
        fit(network(set_for_all))
