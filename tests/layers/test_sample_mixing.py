"""Integers and numbers without gradient that depend on which samples lie together in a micro-batch reach no loss."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import UncoveredError
from tests.claims.trainings import CLASSES, FEATURES, Split
from tests.layers.fitting import fit, network, per_item


def one_hot(y):
    return F.one_hot(y, CLASSES)


def last_of_a_class(x, y):
    table = torch.zeros(CLASSES)
    table[y] = x[:, 0]
    return table[y]


# (x, y) -> one number a sample, which depends on its neighbours.
MIXED = {
    "cumsum": lambda x, y: (one_hot(y).cumsum(0) * one_hot(y)).sum(1),
    "cummax": lambda x, y: torch.cummax(y, 0).values,
    "diff": lambda x, y: torch.diff(y, prepend=torch.zeros(1, dtype=torch.long)),
    "pairs by index": lambda x, y: (y[:, None] == y[None, :]).sum(1),
    "pairs by broadcast": lambda x, y: (y.unsqueeze(1) < y).any(1),
    "isin": lambda x, y: torch.isin(y + 1, y),
    "product of counts": lambda x, y: (one_hot(y) @ one_hot(y).t()).sum(1),
    "einsum": lambda x, y: torch.einsum("ic,jc->i", one_hot(y), one_hot(y)),
    "scatter_add": lambda x, y: torch.zeros(CLASSES, dtype=torch.long).scatter_add_(0, y, torch.ones_like(y))[y],
    "index_put": lambda x, y: torch.zeros(CLASSES, dtype=torch.long).index_put((y,), y + 1, accumulate=True)[y],
    "assignment": last_of_a_class,
    "kthvalue": lambda x, y: y >= y.kthvalue(2, 0).values,
    "aminmax": lambda x, y: y - torch.aminmax(y).min,
    "bucketize": lambda x, y: torch.bucketize(x[:, 0], x[:, 1].sort().values),
    "unique_consecutive": lambda x, y: torch.unique_consecutive(y, return_inverse=True)[1],
    "order of columns": lambda x, y: x.t().argsort(1)[0],
    "flipped columns": lambda x, y: x.t().flip(1).t()[:, 0],
    "take": lambda x, y: y.take(y % len(y)),
    "shifted": lambda x, y: F.pad(y, (1, 0))[:-1],
}


def weighted(numbers):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return (per_item(self, batch) * (numbers(x, y).float() * 0.125 + 1.0)).mean()

    return network(training_step)


@pytest.mark.parametrize("name", MIXED)
def test_what_depends_on_the_neighbours_reaches_no_loss(name):
    for split in (Split(1, 12, 1), Split(1, 4, 3)):
        with pytest.raises(UncoveredError, match="arrangement of the samples of the micro-batch"):
            fit(weighted(MIXED[name]), split=split)


def test_an_order_of_activations_reaches_no_loss():
    def training_step(self, batch, batch_idx):
        order = self.hidden(batch[0]).argsort(0)[:, 0]
        return (per_item(self, batch) * order.float()).mean()

    with pytest.raises(UncoveredError, match="arrangement of the samples of the micro-batch"):
        fit(network(training_step))


def test_it_may_be_logged():
    def training_step(self, batch, batch_idx):
        for name, numbers in MIXED.items():
            self.log(name, numbers(*batch).float().mean())
        return per_item(self, batch).mean()

    assert MIXED.keys() <= fit(network(training_step)).logged.keys()


def marked(x, y):
    marks = torch.zeros(len(y), CLASSES, dtype=torch.long)
    marks[torch.arange(len(y)), y] = 2
    return marks.sum(1) + marks[:, 0]


# The same of numbers that belong to a sample alone. Of 12 samples and of 5 some sizes are as large by chance.
APART = {
    "one hot by comparison": lambda x, y: (y[:, None] == torch.arange(CLASSES)).long().argmax(1),
    "one hot by scatter": lambda x, y: torch.zeros(len(y), CLASSES, dtype=torch.long).scatter(1, y[:, None], 3).sum(1),
    "one hot by assignment": marked,
    "cumsum of a row": lambda x, y: (x > 0).cumsum(1)[:, 3],
    "lengths": lambda x, y: (torch.arange(FEATURES)[None] < y[:, None]).sum(1),
    "pairs within a sample": lambda x, y: ((x > 0)[:, :, None] & (x > 0)[:, None, :]).sum((1, 2)),
    "causal": lambda x, y: ((x > 0)[:, None] & torch.ones(FEATURES, FEATURES).bool().tril()).sum((1, 2)),
    "thresholds": lambda x, y: torch.bucketize(x[:, 0], torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])),
    "isin": lambda x, y: torch.isin(y, torch.tensor([1, 3])),
    "product with constants": lambda x, y: one_hot(y) @ torch.tensor([0, 1, 2, 3, 4]),
    "order of a row": lambda x, y: x.argsort(1)[:, 0] + x.topk(2).indices[:, 1] + x.sort().indices[:, 2],
    "gather": lambda x, y: (x > 0).gather(1, y[:, None])[:, 0],
    "columns": lambda x, y: ((x.t() > 0) & (y > 2)).sum(0) + x.t().argmax(0),
    "shifted row": lambda x, y: F.pad((x > 0).long(), (1, 0))[:, :-1].sum(1),
    "looked up": lambda x, y: torch.tensor([3, 1, 2, 0, 5])[y],
    "repeated": lambda x, y: y.repeat_interleave(2).view(-1, 2)[:, 1],
}


@pytest.mark.parametrize("name", APART)
def test_what_belongs_to_a_sample_alone_is_the_same_at_every_split(name):
    cuts = [Split(1, 60, 1), Split(1, 12, 5), Split(1, 5, 12)]
    one, *others = (fit(weighted(APART[name]), split=split, samples=60, steps=1) for split in cuts)
    assert all(other.weights == one.weights for other in others) and len(set(one.weights)) == 2
