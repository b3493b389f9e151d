"""Every covered loss trains to the same bytes at every split, ignored and uneven items included."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from det_lightning.ops.means import exact_mean
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.trainings import CLASSES, FEATURES, Network, Outcome, Run, Split, train, train_each

SPLITS = [Split(1, 12, 1), Split(1, 3, 4), Split(3, 2, 2)]
WEIGHTS = torch.tensor([0.3, 1.7, 0.01, 1.0, 123.456])


def real_targets(count: int) -> TensorDataset:
    """Features, class probabilities, class indices (some ignored), and how many places of three count."""
    generator = torch.Generator().manual_seed(6)
    probabilities = torch.rand(count, CLASSES, generator=generator)
    classes = torch.randint(-1, CLASSES, (count,), generator=generator)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=generator),
        probabilities,
        torch.where(classes < 0, -100, classes),
        torch.randint(0, 4, (count,), generator=generator),
    )


def weights_for(x: torch.Tensor) -> torch.Tensor:
    """The class weights on the device of the batch."""
    return WEIGHTS.to(x.device)


def tokens(self, x, classes, lengths):
    """Three places a sample, of which the first `lengths` count; logits [n, 3, C] and targets [n, 3]."""
    logits = self(torch.stack([x, x * 0.5, x - 1.0], dim=1))
    kept = torch.arange(3, device=x.device) < lengths.unsqueeze(1)
    return logits, torch.where(kept, classes.clamp(min=0).unsqueeze(1), -100), kept


def logged_only(self, x, p, c, n):
    self.log("other", F.mse_loss(self(x), p), sync_dist=True)
    return F.cross_entropy(self(x), c)


def token_mean_of_each_sample_too(self, x, p, c, n):
    logits, target, kept = tokens(self, x, c, n)
    losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return F.cross_entropy(logits.transpose(1, 2), target) + 0.5 * exact_mean(losses, kept) + 0.1 * losses.mean()


def penalised(self, x, p, c, n):
    ridge = self.hidden.weight.pow(2).sum() + (self.output.weight[1:] - 0.5).square().mean()
    return F.cross_entropy(self(x), c) + 0.01 * ridge + self.hidden.bias.abs().sum() * 0.003


def penalised_where_frozen(self, x, p, c, n):
    """The same penalty on every parameter, of which one is frozen."""
    ridge = sum(0.5 * w.pow(2).sum() for w in self.parameters())
    constant = self.output.bias.abs().mean() - torch.exp(self.output.bias).sum().log()
    return F.cross_entropy(self(x), c) + 0.01 * ridge + 0.5 * constant + F.mse_loss(self(x), p, reduction="sum") * 0.01


LOSSES = {
    "mse": lambda self, x, p, c, n: F.mse_loss(self(x), p),
    "l1": lambda self, x, p, c, n: F.l1_loss(self(x), p),
    "smooth_l1": lambda self, x, p, c, n: F.smooth_l1_loss(self(x), p, beta=0.3),
    "huber": lambda self, x, p, c, n: F.huber_loss(self(x), p, delta=0.7),
    "bce_logits + mse": lambda self, x, p, c, n: (
        F.binary_cross_entropy_with_logits(self(x), p) + 0.25 * F.mse_loss(self(x), p)
    ),
    "bce, weighted": lambda self, x, p, c, n: F.binary_cross_entropy_with_logits(
        self(x), p, weight=(n + 1).float().unsqueeze(1) / 3, pos_weight=weights_for(x)
    ),
    "mse, weighted": lambda self, x, p, c, n: F.mse_loss(self(x), p, weight=(n.unsqueeze(1) * p)),
    "ignored classes": lambda self, x, p, c, n: F.cross_entropy(self(x), c),
    "class weights": lambda self, x, p, c, n: F.cross_entropy(self(x), c, weight=weights_for(x)),
    "label smoothing": lambda self, x, p, c, n: F.cross_entropy(self(x), c, label_smoothing=0.1),
    "weights and smoothing": lambda self, x, p, c, n: (
        F.cross_entropy(self(x), c, weight=weights_for(x), label_smoothing=0.2) / 3
    ),
    "class probabilities": lambda self, x, p, c, n: F.cross_entropy(
        self(x), p, weight=weights_for(x), label_smoothing=0.1
    ),
    "nll": lambda self, x, p, c, n: F.nll_loss(F.log_softmax(self(x), dim=1), c, weight=weights_for(x)),
    "kl_div": lambda self, x, p, c, n: F.kl_div(F.log_softmax(self(x), dim=-1), p, reduction="batchmean"),
    "a sum": lambda self, x, p, c, n: 0.01 * F.cross_entropy(self(x), c, reduction="sum"),
    "values.sum()": lambda self, x, p, c, n: 0.01 * F.mse_loss(self(x), p, reduction="none").sum(),
    "a mean and a sum": lambda self, x, p, c, n: F.mse_loss(self(x), p) + 0.01 * F.l1_loss(self(x), p, reduction="sum"),
    "tokens": lambda self, x, p, c, n: F.cross_entropy(*(t.flatten(0, 1) for t in tokens(self, x, c, n)[:2])),
    "unlike denominators": token_mean_of_each_sample_too,
    "four denominators": lambda self, x, p, c, n: (
        F.cross_entropy(self(x), c)
        + F.cross_entropy(self(x), c, weight=weights_for(x))
        + F.mse_loss(self(x), p)
        + 0.02 * (self(x) * p).sum()
    ),
    "penalties": penalised,
    "penalties, partly frozen": penalised_where_frozen,
    "a logged loss": logged_only,
}


class Lossy(Network):
    """The network under a loss chosen by name."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.output.bias.requires_grad_("frozen" not in name)

    def training_step(self, batch, batch_idx):
        return LOSSES[self.name](self, *batch)


class Build:
    """() -> the module; a class, so that it goes to another process."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self):
        return Lossy(self.name)


def run_of(name: str, split: Split, **options) -> Run:
    # 40 samples, 12 a step: the last step of an epoch has 4, and ranks without any.
    return Run(split=split, steps=4, samples=40, build=Build(name), data=real_targets, **options)


@cache
def outcomes(split: Split) -> dict[str, Outcome]:
    """Every loss at this split, all in one group of processes."""
    runs = [run_of(name, split) for name in LOSSES]
    ports = [free_port() for _ in runs[1:]]
    return dict(zip(LOSSES, on_ranks(split.world_size, train_each, runs, ports)[0], strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_C03_C04_C36_the_loss_and_the_weights_do_not_depend_on_the_split(name):
    first, *others = (outcomes(split)[name] for split in SPLITS)
    for outcome in others:
        assert outcome.weights == first.weights
        assert outcome.losses == first.losses
    assert len(set(first.weights)) == 5


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_stock_loss_up_to_rounding(name):
    """One rank and one micro-batch, where the stock strategy divides by the same number."""
    ours = outcomes(SPLITS[0])[name]
    # Lightning would shuffle for ddp, although the loader does not ask for it.
    options = {"strategy": "ddp", "trainer": {"use_distributed_sampler": False}}
    stock = train(0, 1, free_port(), run_of(name, SPLITS[0], **options))
    for step in (0, 1):
        a, b = (np.frombuffer(outcome.weights[step], dtype=np.float32) for outcome in (ours, stock))
        assert np.abs(a - b).max() < 1e-5
    assert abs(np.frombuffer(ours.losses[0], np.float32) / np.frombuffer(stock.losses[0], np.float32) - 1) < 1e-5


def test_C03_C36_the_stock_strategy_fails_the_same_check():
    """A token mean under ddp is a mean of means: two micro-batches and one differ by more than rounding."""
    whole, halves = (
        train(0, 1, free_port(), run_of("tokens", split, strategy="ddp")) for split in (Split(1, 12, 1), Split(1, 6, 2))
    )
    a, b = (np.frombuffer(outcome.weights[1], dtype=np.float32) for outcome in (whole, halves))
    assert np.abs(a - b).max() > 1e-4


def test_C36_the_stock_strategy_fails_the_same_check_with_item_weights():
    whole, thirds = (
        train(0, 1, free_port(), run_of("bce, weighted", split, strategy="ddp"))
        for split in (Split(1, 12, 1), Split(1, 4, 3))
    )
    assert whole.weights[0] == thirds.weights[0] and whole.weights[-1] != thirds.weights[-1]
