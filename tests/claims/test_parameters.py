"""Parameters outside linear layers: their gradients are exact sums over all samples too, whatever the split."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.trainings import CLASSES, HIDDEN, Network, Outcome, Run, Split, train, train_each

SPLITS = [Split(1, 12, 1), Split(1, 1, 12), Split(3, 2, 2)]


class LowRank(nn.Module):
    """A parametrization of torch.nn.utils: weight + high @ low."""

    def __init__(self):
        super().__init__()
        self.high, self.low = nn.Parameter(torch.full((CLASSES, 2), 0.1)), nn.Parameter(torch.eye(HIDDEN)[:2] * 0.3)

    def forward(self, weight):
        return weight + self.high @ self.low


class Uses(Network):
    """A network with parameters of every shape that the uses below ask for; the others have no gradient."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        generator = torch.Generator().manual_seed(11)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(shape, generator=generator) - 0.4)

        self.scale, self.shift, self.single = made(HIDDEN), made(HIDDEN), made()
        self.token, self.places = made(1, 1, HIDDEN), made(1, 7, HIDDEN)
        self.low, self.high, self.table = made(2, HIDDEN), made(CLASSES, 2), made(9, HIDDEN)
        self.part = made(2, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, CLASSES, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.frozen.weight.copy_(torch.rand(CLASSES, HIDDEN, generator=generator) - 0.5)
        self.parametrized = nn.Linear(HIDDEN, CLASSES)
        with torch.no_grad():
            for parameter in self.parametrized.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        register_parametrization(self.parametrized, "weight", LowRank())
        self.register_buffer("index", torch.tensor([4, 4, 0]))
        self.register_buffer("mask", (torch.rand(CLASSES, HIDDEN, generator=generator) > 0.3).float())

    def classify(self, h):
        return self.output(F.relu(h))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return USES[self.name](self, x, self.hidden(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def loss(logits, y):
    return F.cross_entropy(logits, y)


def tokens(self, x, h, y):
    sequence = torch.cat([self.token.expand(len(x), -1, -1), torch.stack([h, 0.5 * h], 1)], 1) + self.places[:, 1:4]
    return loss(self.classify(sequence[:, 0] * 0.5 + sequence[:, 1] - sequence[:, 2]), y)


def table_by_a_buffer(self, x, h, y):
    shifted = h.unsqueeze(1) * self.table[self.index]
    constant = torch.arange(5, device=x.device)
    return loss(self.classify(shifted.unbind(1)[1] + self.table[constant][3]), y)


def queries(self, x, h, y):
    """Samples in the dimension 1."""
    spread = self.table[:3].unsqueeze(1).expand(-1, len(x), -1) + h.unsqueeze(0) * self.table[3:6].unsqueeze(1)
    return loss(self.classify(spread.unbind(0)[1] - spread.unbind(0)[2]), y)


def tied(self, x, h, y):
    again = F.relu(h) @ self.hidden.weight - x
    return loss(self.classify(h), y) + 0.1 * F.mse_loss(again, x)


def standardised(self, x, h, y):
    w = self.output.weight
    centred = w - w.mean(1, keepdim=True)
    return loss(F.linear(F.relu(h), centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()), y)


def pruned(self, x, h, y):
    w = self.output.weight
    return loss(F.linear(F.relu(h * self.scale.exp().detach()), w * (w.abs() > 0.1) * self.scale.exp().detach()), y)


def in_place(self, x, h, y):
    h = h * 1.0
    h += self.shift
    h.mul_(self.scale)
    return loss(self.classify(h), y)


def with_a_penalty(self, x, h, y):
    width = F.softplus(self.scale)
    return loss(self.classify(h / width), y) + 0.01 * width.log().sum() + 0.001 * self.scale.square().sum()


def two_denominators(self, x, h, y):
    gated = torch.sigmoid(self.scale) * h + self.shift
    return loss(self.classify(gated), y) + 0.05 * (gated * gated).sum() * 0.01


def checkpointed(self, x, h, y):
    width, half = torch.tanh(self.shift), torch.tensor(0.5, device=x.device)

    def region(h, scale, width):
        return F.relu(h * scale + width) * torch.sigmoid(self.scale * half) + self.shift * width

    logits = self.output(checkpoint(region, h, self.scale, width, use_reentrant=False))
    return loss(logits, y) + 0.0005 * (logits * logits).sum()  # two denominators: computed again for each


def nested(self, x, h, y):
    def inner(h):
        return h * self.scale.exp() + self.table[2]

    def outer(h):
        return self.classify(checkpoint(inner, h, use_reentrant=False) + self.shift[None])

    return loss(checkpoint(outer, h, use_reentrant=False), y)


USES = {
    "scale and shift": lambda self, x, h, y: loss(self.classify(h * self.scale + self.shift), y),
    "shift first": lambda self, x, h, y: loss(self.classify(self.shift - h), y),
    "temperature": lambda self, x, h, y: loss(self.classify(h) / self.single, y),
    "0-dim scale": lambda self, x, h, y: loss(self.classify(self.single * h + self.single), y),
    "gate": lambda self, x, h, y: loss(self.classify(torch.sigmoid(self.scale) * h), y),
    "exponential": lambda self, x, h, y: loss(self.classify(h) * self.single.exp(), y),
    "clamped": lambda self, x, h, y: loss(self.classify(h) * self.single.exp().clamp(max=1.2), y),
    "keywords": lambda self, x, h, y: loss(
        self.classify(torch.mul(input=torch.add(h, other=self.shift), other=self.scale)), y
    ),
    "queries": queries,
    "rows chosen by samples": lambda self, x, h, y: loss(
        self.classify(h + F.one_hot((x[:, 0] > 0).long(), 9).to(h.dtype) @ self.table), y
    ),
    "a mask token": lambda self, x, h, y: loss(self.classify(torch.where(h > 0, h, self.shift.expand_as(h))), y),
    "parametrized": lambda self, x, h, y: loss(self.parametrized(F.relu(h)), y),
    "prelu": lambda self, x, h, y: loss(self.output(F.relu(h) - self.single * F.relu(-h)), y),
    "tokens": tokens,
    "repeated token": lambda self, x, h, y: loss(
        self.classify(torch.cat([self.token.repeat(len(x), 1, 1), h.unsqueeze(1)], 1).view(len(x), -1)[:, :HIDDEN] + h),
        y,
    ),
    "a table by a buffer": table_by_a_buffer,
    "concatenated weight": lambda self, x, h, y: loss(F.linear(h, torch.cat([self.low, self.part, self.low[:1]])), y),
    "transposed weight": lambda self, x, h, y: loss(self.classify(h @ F.linear(self.low.t(), self.low.t())), y),
    "tied": tied,
    "low rank": lambda self, x, h, y: loss(F.linear(F.relu(h), self.frozen.weight + 2.0 * (self.high @ self.low)), y),
    "standardised": standardised,
    "masked": lambda self, x, h, y: loss(F.linear(F.relu(h), self.output.weight * self.mask, self.output.bias), y),
    "pruned": pruned,
    "in place": in_place,
    "a penalty of the same function": with_a_penalty,
    "two denominators": two_denominators,
    "checkpointed": checkpointed,
    "checkpointed twice": nested,
    "heads": lambda self, x, h, y: loss(
        self.classify((h.view(-1, 4, 4) * self.scale.view(4, 4).t() + self.shift.view(1, 4, 4)).flatten(1)), y
    ),
}


class Build:
    def __init__(self, name: str):
        self.name = name

    def __call__(self):
        return Uses(self.name)


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
