"""What depends on which samples lie together in a micro-batch is refused; loops over samples are not."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import UncoveredError
from det_lightning.layers.sample_places import SamplePlaces, places_of
from det_lightning.ops.means import exact_mean
from tests.claims.trainings import CLASSES, HIDDEN, Split
from tests.layers.fitting import fit, network, per_item


def head(self, h, y):
    return F.cross_entropy(self.output(F.relu(h)), y)


MIXED = {
    "halves": lambda self, x, h, y: head(self, h - torch.cat([h[len(h) // 2 :], h[: len(h) // 2]]), y),
    "neighbours": lambda self, x, h, y: head(self, h, y) + ((h[1:] - h[:-1]) * 0.1).sum(),
    "pieces": lambda self, x, h, y: head(self, torch.cat([part * 0.5 for part in reversed(h.chunk(2))]) + h, y),
    "the first of an unbind": lambda self, x, h, y: head(self, h * x.unbind(0)[0][0], y),
    "the label of the first": lambda self, x, h, y: exact_mean(per_item(self, (x, y)), y == y[0]),
    "places as weights": lambda self, x, h, y: (per_item(self, (x, y)) * torch.arange(len(y)).float()).mean(),
    "places as features": lambda self, x, h, y: head(self, h * torch.arange(len(y)).float().unsqueeze(1), y),
    "products of samples": lambda self, x, h, y: head(self, h + F.linear(h.detach(), h.detach()).sum() * 0, y),
    "a matrix of samples": lambda self, x, h, y: head(self, F.linear(h, x[0, 0].expand(HIDDEN, HIDDEN)), y),
    "a count of labels": lambda self, x, h, y: head(self, h * (y.sum() % 3), y),
    "labels that occur": lambda self, x, h, y: F.cross_entropy(
        self(x), y, weight=torch.bincount(y, minlength=CLASSES).float() + 1
    ),
    "items by their number": lambda self, x, h, y: (per_item(self, (x, y)) / len(y)).sum(),
}


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_each_other_are_refused(name):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return MIXED[name](self, x, self.hidden(x), y)

    message = r"arrangement of the samples of the micro-batch|computed from samples|the number of its samples"
    with pytest.raises(UncoveredError, match=message):
        fit(network(training_step))


def one_by_one(self, x, h, y):
    rows = [self.output(F.relu(row * 0.5)) for row in (r.unsqueeze(0) for r in h.unbind(0))]
    return F.cross_entropy(torch.cat(rows), y)


def one_loss_each(self, x, h, y):
    losses = [F.cross_entropy(self.output(h[i : i + 1]), y[i : i + 1], reduction="none") for i in range(len(h))]
    return torch.cat(losses).mean()


def in_halves(self, x, h, y):
    half = len(h) // 2
    return F.cross_entropy(torch.cat([self.output(F.relu(h[:half])), self.output(F.relu(h[half:]))]), y)


def with_lengths(self, x, h, y):
    kept = torch.arange(3) < (y + 1).unsqueeze(1)
    tokens = torch.stack([h, h * 0.5, -h], 1)
    losses = F.cross_entropy(self.output(tokens).flatten(0, 1), y.repeat_interleave(3), reduction="none")
    return exact_mean(losses.view(-1, 3), kept)


@pytest.mark.parametrize("loss", [one_by_one, one_loss_each, in_halves, with_lengths])
def test_samples_that_are_worked_on_apart_give_the_same_bytes_at_every_split(loss):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return loss(self, x, self.hidden(x), y)

    build = network(training_step)
    whole, parts, singles = (
        fit(build, split=split, options={"global_batch": 12})
        for split in (Split(1, 12, 1), Split(1, 3, 4), Split(1, 1, 12))
    )
    assert whole.weights == parts.weights == singles.weights and len(set(whole.weights)) == 3


def test_a_number_that_depends_on_the_samples_is_found_where_it_differs_within_a_step():
    def training_step(self, batch, batch_idx):
        x, y = batch
        return head(self, self.hidden(x) * float(x.max()), y)

    with pytest.raises(UncoveredError, match="made their losses unlike"):
        fit(network(training_step), split=Split(1, 4, 3))


def test_places_are_followed_through_picks_and_joins():
    places = SamplePlaces(4, lambda tensor: False)
    x = torch.zeros(4, 3)

    def call(name, func, *args):
        operands = [v for a in args for v in (a if isinstance(a, list) else [a]) if isinstance(v, torch.Tensor)]
        result = func(*args)
        assert not places.follow(name, args, {}, operands, result)
        return result

    pair = call("getitem", torch.Tensor.__getitem__, x, slice(1, 3))
    assert places_of(pair) == (1, 2)
    assert places_of(call("getitem", torch.Tensor.__getitem__, pair, 1)) == 2
    first, second = call("split", torch.split, x, 2)
    assert (places_of(first), places_of(second)) == ((0, 1), (2, 3))
    assert places_of(call("cat", torch.cat, [second, first])) == (2, 3, 0, 1)
    assert places_of(call("cat", torch.cat, [first, second])) is None
    rows = call("unbind", torch.unbind, x)
    assert [places_of(row) for row in rows] == [0, 1, 2, 3]
    assert places_of(call("stack", torch.stack, list(rows))) is None
    assert places_of(call("narrow", torch.narrow, x, 0, 1, 2)) == (1, 2)
    assert places_of(call("select", torch.select, x, 0, 3)) == 3
    assert places_of(call("getitem", torch.Tensor.__getitem__, x, (slice(None), 1))) is None
    # Three of four dimensions permuted: dimension 0 is not outermost in memory, and holds something else.
    assert places_of(call("getitem", torch.Tensor.__getitem__, torch.zeros(5, 4, 2).permute(1, 0, 2), 0)) is None
