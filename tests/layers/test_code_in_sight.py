"""TorchScript and compiled functions run where no function mode looks, also on tensors without gradient, whose steps are in
no graph: the one is refused, the other runs as the Python code that it is."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from det_lightning.errors import UncoveredError
from det_lightning.layers.code_in_sight import code_in_sight
from tests.claims.trainings import FEATURES, Network, Split
from tests.layers.fitting import fit, network

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


def centred(x):
    return x - x.mean(0)


with warnings.catch_warnings(action="ignore"):
    centred = torch.jit.script(centred)


class Taught(Network):
    """By a frozen teacher that was compiled to TorchScript."""

    def __init__(self, compiled):
        super().__init__()
        self.teacher = compiled(nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 5)))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0])
        return F.mse_loss(self(batch[0]), target)


def traced(module):
    return torch.jit.trace(module, torch.zeros(2, FEATURES))


def in_the_step(self, batch, batch_idx):
    return F.cross_entropy(self(centred(batch[0])), batch[1])


def in_a_hook(hook):
    def step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    return network(step, **{hook: lambda self, batch, loader: [centred(batch[0]), batch[1]]})


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (network(in_the_step), "centred"),
        (in_a_hook("on_before_batch_transfer"), "centred"),
        (in_a_hook("on_after_batch_transfer"), "centred"),
        (lambda: Taught(torch.jit.script), "forward"),
        (lambda: Taught(traced), "forward"),
    ],
)
@pytest.mark.parametrize("split", [Split(1, 12, 1), Split(1, 4, 3)], ids=str)
def test_torchscript_is_refused_by_name(build, name, split):
    with pytest.raises(UncoveredError, match=f"the TorchScript function {name}.* call the Python function or module"):
        fit(build, split=split)
    assert torch.equal(centred(torch.ones(2, 2)), torch.zeros(2, 2)), "it runs again as before"


def test_in_validation_it_runs():
    class Validates(Network):
        def validation_step(self, batch, batch_idx):
            self.log("validation", centred(batch[0]).sum())

    assert len(set(fit(Validates, validation=8).weights)) == 3


def counting_backend(calls):
    def backend(graph, inputs):
        def run(*arguments):
            calls.append(len(arguments))
            return graph(*arguments)

        return run

    return backend


@pytest.mark.parametrize("gradient", [False, True])
def test_a_compiled_function_runs_as_the_code_that_it_is(gradient):
    def scaled(x):
        return x * 1.5 + 0.25

    calls = []
    compiled = torch.compile(scaled, backend=counting_backend(calls))
    compiled(torch.ones(12, FEATURES)), compiled(torch.ones(4, FEATURES))
    assert calls, "it was compiled before"
    before = len(calls)

    def weights(function, split):
        def training_step(self, batch, batch_idx):
            y = self(batch[0]) if gradient else self(function(batch[0]))
            return F.cross_entropy(function(y) if gradient else y, batch[1])

        return fit(network(training_step), split=split).weights

    splits = [Split(1, 12, 1), Split(1, 4, 3)]
    assert all(weights(compiled, split) == weights(scaled, splits[0]) for split in splits)
    assert len(calls) == before
    compiled(torch.ones(4, FEATURES))
    assert len(calls) == before + 1, "after the fit it is compiled again"


@pytest.mark.parametrize("wrapped", [lambda f: f, lambda f: lambda x: checkpoint(f, x, use_reentrant=False)])
def test_what_a_compiled_function_calls_is_seen(wrapped):
    compiled = wrapped(torch.compile(lambda x: x - x.mean(0)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(compiled(batch[0])), batch[1])

    with pytest.raises(UncoveredError, match="mean"):
        fit(network(training_step))


def test_it_ends_with_the_context():
    stock = torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__
    with pytest.raises(ZeroDivisionError), code_in_sight():
        assert torch._C.ScriptFunction.__call__ is not stock[0]
        assert torch.equal(centred(torch.ones(2, 2)), torch.zeros(2, 2)), "without a mode nothing is refused"
        raise ZeroDivisionError
    assert (torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__) == stock
