"""Parameters outside linear layers: their gradients are exact sums over all samples too, whatever the split."""

from functools import cache

import numpy as np
import pytest
import torch

from det_lightning.strategies.given_ranks import free_port
from tests.claims.parameter_uses import USES, Build, Uses, loss
from tests.claims.processes import on_ranks
from tests.claims.trainings import Outcome, Run, Split, train, train_each

SPLITS = [Split(1, 12, 1), Split(1, 1, 12), Split(3, 2, 2)]


def run_of(name: str, split: Split, **options) -> Run:
    # 40 samples, 12 a step: the last step of an epoch has 4, and ranks without any.
    options = {"samples": 40, "options": {"global_batch": 12}, "build": Build(name), **options}
    return Run(split=split, steps=4, **options)


@cache
def outcomes(split: Split) -> dict[str, Outcome]:
    """Every use at this split, in one group of processes; mixed precision besides."""
    runs = {name: run_of(name, split) for name in USES}
    for name in ("scale and shift", "tokens", "low rank", "checkpointed"):
        runs |= {
            f"{name} {kind}": run_of(name, split, trainer={"precision": kind}) for kind in ("bf16-mixed", "bf16-true")
        }
    ports = [free_port() for _ in list(runs)[1:]]
    return dict(zip(runs, on_ranks(split.world_size, train_each, list(runs.values()), ports)[0], strict=True))


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_the_weights_do_not_depend_on_the_split(split):
    expected, found = outcomes(SPLITS[0]), outcomes(split)
    differing = [
        name
        for name, one in found.items()
        if (one.weights, one.losses) != (expected[name].weights, expected[name].losses)
    ]
    assert differing == []
    assert all(len(set(outcome.weights)) == 5 for outcome in expected.values())


def plain(name: str, split: Split, samples: int) -> Outcome:
    """The stock training on one rank, without DDP, which asks for a gradient of every parameter."""
    trainer = {"strategy": "auto"}
    return train(0, 1, free_port(), run_of(name, split, strategy="ddp", options={}, samples=samples, trainer=trainer))


@pytest.mark.parametrize("name", USES)
def test_it_is_the_stock_training_up_to_rounding(name):
    ours, stock = outcomes(SPLITS[0])[name], plain(name, SPLITS[0], 40)
    for step in (1, 2):
        a, b = (np.frombuffer(outcome.weights[step], dtype=np.float32) for outcome in (ours, stock))
        assert np.abs(a - b).max() < 1e-5
    assert ours.weights[1] != ours.weights[0]


@pytest.mark.parametrize("name", ["scale and shift", "low rank"])
def test_the_stock_strategy_fails_the_same_check(name):
    whole, thirds = (plain(name, split, 48) for split in (Split(1, 12, 1), Split(1, 4, 3)))
    assert whole.weights[0] == thirds.weights[0] and whole.weights[-1] != thirds.weights[-1]


class FrozenUses(Uses):
    """Only the first layer and what is not named in the uses is trained: their functions are constants now."""

    def __init__(self, name: str):
        super().__init__(name)
        for parameter in "scale shift single token places low high table part".split():
            getattr(self, parameter).requires_grad_(False)


class FrozenBuild(Build):
    def __call__(self):
        return FrozenUses(self.name)


def test_what_is_covered_of_a_parameter_is_covered_with_the_same_bits_where_it_is_frozen():
    def frozen(split: Split) -> list[Outcome]:
        runs = [run_of(name, split, build=FrozenBuild(name)) for name in USES]
        return on_ranks(split.world_size, train_each, runs, [free_port() for _ in runs[1:]])[0]

    one, thirds, trained = frozen(SPLITS[0]), frozen(SPLITS[2]), outcomes(SPLITS[0])
    for name, a, b in zip(USES, one, thirds, strict=True):
        assert (a.weights, a.losses) == (b.weights, b.losses), name
        assert a.losses[0] == trained[name].losses[0] and a.weights[-1] != a.weights[0], name


class ByHand(Uses):
    """One gate, used by two losses that go backward one after the other."""

    def __init__(self):
        super().__init__("")
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        gate = torch.sigmoid(self.scale)
        h = self.hidden(x)
        self.manual_backward(loss(self.classify(h.detach() * gate), y), retain_graph=True)
        second = 0.5 * loss(self.classify(gate * h + self.shift), y) + 0.01 * gate.sum()
        self.manual_backward(second)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return second.detach()


def test_a_function_of_parameters_may_be_used_by_two_losses_by_hand():
    def run(split: Split, **options) -> Run:
        options = {"options": {"global_batch": 12}, **options}
        return Run(split=split, steps=3, samples=40, build=ByHand, **options)

    unclipped = {"gradient_clip_val": None}
    one = train(0, 1, free_port(), run(Split(1, 12, 1), trainer=unclipped))
    two = on_ranks(2, train, run(Split(2, 6, 1), trainer=unclipped))[0]
    assert one.weights == two.weights and len(set(one.weights)) == 4
    stock = run(Split(1, 12, 1), trainer={**unclipped, "strategy": "auto"}, strategy="ddp", options={})
    a, b = (np.frombuffer(o.weights[2], np.float32) for o in (one, train(0, 1, free_port(), stock)))
    assert np.abs(a - b).max() < 1e-5


class Unlike(Uses):
    """A rank that takes a branch of its own."""

    def __init__(self):
        super().__init__("")

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.hidden(x)
        return loss(self.classify(h * self.scale.exp() if self.global_rank else h), y)


def test_ranks_with_unlike_functions_of_parameters_end_with_a_message():
    with pytest.raises(BaseException, match="made their losses unlike"):
        on_ranks(2, train, Run(split=Split(2, 6, 1), steps=2, build=Unlike))
