"""Numbers that differ between the micro-batches of a step are refused wherever they enter; the same numbers are not."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning import random
from det_lightning.errors import UncoveredError
from det_lightning.ops.means import exact_mean
from det_lightning.strategies.given_ranks import free_port
from tests.claims.trainings import CLASSES, Run, Split, train
from tests.layers.fitting import fit, loss_of, network


def test_a_constant_that_depends_on_the_size_of_a_micro_batch_is_found_where_sizes_differ():
    def training_step(self, batch, batch_idx):
        return loss_of(self, batch) * len(batch[0])

    options = {"split": Split(1, 4, 3), "options": {"global_batch": 11}}
    with pytest.raises(UncoveredError, match=r"A number that depends on the size of the batch, on what"):
        fit(network(training_step), **options)


def numbered(compute):
    """A Network whose loss is compute(module, x, y, a number that differs between the micro-batches of a step)."""
    return network(lambda self, batch, batch_idx: compute(self, *batch, 1 + batch_idx % 3 / 10))


NUMBERS = {
    "input": lambda self, x, y, k: F.cross_entropy(self(x * k), y),
    "input, by a tensor": lambda self, x, y, k: F.cross_entropy(self(x * torch.tensor(k)), y),
    "activation, by a tensor": lambda self, x, y, k: F.cross_entropy(self(x) * torch.tensor(k), y),
    "input, by a tensor of an integer": lambda self, x, y, k: F.cross_entropy(self(x * torch.tensor(round(10 * k))), y),
    "full": lambda self, x, y, k: F.cross_entropy(self(x) * torch.full((CLASSES,), k), y),
    "full of an integer": lambda self, x, y, k: F.cross_entropy(self(x) + torch.full((CLASSES,), round(10 * k)), y),
    "new_full": lambda self, x, y, k: F.cross_entropy(self(x) * x.new_full((CLASSES,), k), y),
    "new_full of an integer": lambda self, x, y, k: F.cross_entropy(
        self(x) * y.new_full((len(y), 1), round(10 * k)), y
    ),
    "a scaled constant": lambda self, x, y, k: F.cross_entropy(self(x) * (torch.full((CLASSES,), 0.5) * k), y),
    "full_like": lambda self, x, y, k: F.mse_loss(self(x), torch.full_like(x[:, :CLASSES], k)),
    "fill_": lambda self, x, y, k: F.cross_entropy(self(x) * torch.zeros(CLASSES).fill_(k), y),
    "a constant's views and functions": lambda self, x, y, k: F.cross_entropy(
        self(x) * torch.full((1,), k).expand(CLASSES).clone().to(torch.float64).float()[None].exp(), y
    ),
    "a number, expanded": lambda self, x, y, k: F.cross_entropy(self(x) * torch.tensor(k).expand(CLASSES), y),
    "ones times a number": lambda self, x, y, k: F.cross_entropy(self(x) * (torch.ones(CLASSES) * torch.tensor(k)), y),
    "a column of a constant": lambda self, x, y, k: F.cross_entropy(
        self(torch.cat([x[:, 1:], torch.full((len(x), 1), k)], dim=1)), y
    ),
    "in place": lambda self, x, y, k: F.cross_entropy(self(x.clone().mul_(k)), y),
    "clamp": lambda self, x, y, k: F.cross_entropy(self(x.clamp(max=k / 10)), y),
    "masked_fill": lambda self, x, y, k: F.cross_entropy(self(x).masked_fill(x[:, :CLASSES] > 0, k), y),
    "label_smoothing": lambda self, x, y, k: F.cross_entropy(self(x), y, label_smoothing=k / 10),
    "dropout": lambda self, x, y, k: F.cross_entropy(F.dropout(self(x), k / 10), y),
    "mask": lambda self, x, y, k: exact_mean(F.cross_entropy(self(x), y, reduction="none"), y >= round(10 * k) - 10),
    "an integer of a loss": lambda self, x, y, k: F.huber_loss(self(x), x[:, :CLASSES], delta=round(10 * k)),
    "an ignored class": lambda self, x, y, k: F.cross_entropy(self(x), y, ignore_index=round(10 * k) - 10),
    "a bound of random integers": lambda self, x, y, k: F.cross_entropy(
        self(x + random.randint_like(x, 0, round(10 * k))), y
    ),
    "a shift": lambda self, x, y, k: F.cross_entropy(self(x.roll(round(10 * k), 1)), y),
    "a value of the samples": lambda self, x, y, k: F.cross_entropy(self(x / (1 + x.abs().max().item())), y),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_differs_between_micro_batches_is_refused_wherever_it_enters(name):
    with pytest.raises(UncoveredError, match="made their losses unlike"):
        fit(numbered(NUMBERS[name]), split=Split(1, 4, 3))


def test_numbers_that_do_not_reach_a_gradient_may_differ():
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, reduction="none")
        scales = torch.tensor([0.5 + each for each in y.tolist()])  # of samples, as a collate function may leave them
        total = (loss * scales).mean()
        if not hasattr(self, "table"):
            self.table = torch.full((CLASSES,), 0.3) / 7.0  # kept for the next micro-batches
        total = total + F.mse_loss(logits * (torch.arange(5.0) / 6.0 + self.table), torch.zeros_like(logits))
        self.log("sum", total * len(x))
        self.log("right", (logits.argmax(1) == y).sum() / len(x))
        self.log("spread", ((logits.detach() / len(x)) > batch_idx).float().mean())
        return total

    options = {"options": {"global_batch": 11}}
    thirds, whole = (fit(network(training_step), split=split, **options) for split in (Split(1, 4, 3), Split(1, 11, 1)))
    assert thirds.weights == whole.weights and len(set(whole.weights)) == 3


def constants(module, x, y):
    """Losses that are made with constants whose shapes, or whose numbers where they are places, depend on the batch."""
    logits, count = module(x), len(x)
    if not hasattr(module, "kept"):
        module.kept = torch.full((CLASSES,), 0.3).mul_(2.0)
    logits = logits * torch.full((count, 1), 0.5) + torch.zeros(count, 1) - module.kept * x.new_full((count, 1), 2)
    positions = torch.cat([torch.full((1,), place) for place in range(count)])
    logits = logits + F.one_hot(positions.clamp(max=0), CLASSES).to(logits.dtype)
    sizes = torch.full((CLASSES,), 100 + count)
    logits = logits.masked_fill(torch.arange(CLASSES) > sizes, float("-inf"))
    weights = torch.zeros(count, CLASSES)
    for row, label in enumerate(y.tolist()):
        weights[row, : label + 1] = 1.0 / (label + 1)
    weights = weights + torch.stack([torch.full((CLASSES,), 0.25 + label) for label in y.tolist()])
    return F.cross_entropy(logits, torch.full((count,), 1)) + (logits * weights).masked_fill(logits < -1e30, 0.0).mean()


def test_constants_of_the_same_number_may_have_the_shape_of_the_micro_batch():
    build = network(lambda self, batch, batch_idx: constants(self, *batch))
    options = {"options": {"global_batch": 11}}
    thirds, whole = (fit(build, split=split, **options) for split in (Split(1, 4, 3), Split(1, 11, 1)))
    assert thirds.weights == whole.weights and len(set(whole.weights)) == 3


def test_micro_batches_with_unlike_losses_are_refused():
    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        return loss + loss_of(self, batch) if batch_idx == 1 else loss

    with pytest.raises(UncoveredError, match=r"micro-batches of one step made their losses unlike"):
        train(0, 1, free_port(), Run(split=Split(1, 4, 3), build=network(training_step), samples=24, steps=2))
