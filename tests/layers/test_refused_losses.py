"""Losses that are not sums of means, and values that depend on the cut of the batch, are refused."""

import pytest
import torch
import torch.nn.functional as F

from det_lightning.errors import InputError, UncoveredError
from det_lightning.ops.means import exact_mean
from tests.claims.trainings import CLASSES, Network
from tests.layers.fitting import fit, loss_of, network, per_item

LOSSES = {
    "a mean of means": (lambda self, b: torch.stack([loss_of(self, b), loss_of(self, b)]).mean(), "stack is applied"),
    "means in a list": (
        lambda self, b: torch.stack([loss_of(self, b)] * 2).sum(),
        r"Add them as they are, .* sum\(losses\)",
    ),
    "a penalty on gradients": (
        lambda self, b: loss_of(self, b) + torch.autograd.grad(loss_of(self, b), self.output.bias)[0].pow(2).sum(),
        r"no arithmetic contract for grad, .* no loss \(a gradient penalty\)",
    ),
    "a mean again": (lambda self, b: loss_of(self, b).mean(), "mean is applied to a mean"),
    "a product of means": (lambda self, b: loss_of(self, b) * loss_of(self, b), "mul is applied to a mean"),
    "a power": (lambda self, b: loss_of(self, b) ** 2, "pow is applied to a mean"),
    "a root": (lambda self, b: loss_of(self, b).sqrt(), "sqrt is applied to a mean"),
    "a ratio": (lambda self, b: 1.0 / loss_of(self, b), "is applied to a mean"),
    "a tensor times a mean": (lambda self, b: torch.tensor(0.5) * loss_of(self, b), "mul is applied to a mean"),
    "a mean in the items": (lambda self, b: (per_item(self, b) * loss_of(self, b)).mean(), "mul is applied to a mean"),
    "a mean in a view": (lambda self, b: loss_of(self, b).expand(3).mean(), "expand is applied to a mean"),
    "samples chosen by a mask": (
        lambda self, b: per_item(self, b)[b[1] > 1].mean(),
        r"getitem with a gradient.*\.exact_mean\(values, mask\)",
    ),
    "samples left out": (lambda self, b: per_item(self, b)[:5].mean(), "mean over 5 items of 12 samples.* all true"),
    "a sum over its samples": (
        lambda self, b: F.cross_entropy(self(b[0]), b[1], reduction="sum") / len(b[0]),
        r"divided by 12, the number of its samples, .*Write the mean: reduction='mean'",
    ),
    "a sum over a mask": (
        lambda self, b: (per_item(self, b) * (b[1] > 1)).sum() / (b[1] > 1).sum(),
        r"Write det_lightning\.exact_mean\(values, mask\)",
    ),
    "no mean": (lambda self, b: per_item(self, b)[0], "not a mean that"),
    "not a scalar": (lambda self, b: per_item(self, b), "not a mean that"),
    "no gradient": (lambda self, b: loss_of(self, b).detach(), "not a mean that"),
    "none": (lambda self, b: None, "NoneType without a loss"),
    "a dict without loss": (lambda self, b: {"logits": 1}, "dict without a loss"),
    "nine means": (lambda self, b: sum(loss_of(self, b) for _ in range(9)), "at most 8 means"),
    "five denominators": (
        lambda self, b: sum(exact_mean(per_item(self, b), b[1] > n) for n in range(-2, 3)),
        "5 unlike numbers of items; at most 4",
    ),
    "one dimension": (lambda self, b: self(b[0]).mean(1).mean(), "mean over chosen dimensions"),
    "item weights of another shape": (
        lambda self, b: F.binary_cross_entropy_with_logits(self(b[0])[:, 0], b[1].float(), weight=torch.ones(5)),
        r"weight of float32 without gradient that broadcasts to the predictions' shape \[12\], got torch\.float32 \[5\]",
    ),
    "weights that are trained": (
        lambda self, b: F.binary_cross_entropy_with_logits(self(b[0]), b[0][:, :CLASSES], pos_weight=self.output.bias),
        "takes a pos_weight of float32 without gradient",
    ),
    "negative class weights": (
        lambda self, b: F.cross_entropy(self(b[0]), b[1], weight=-torch.ones(CLASSES)),
        "finite and not negative",
    ),
    "a penalty alone": (lambda self, b: self.hidden.weight.pow(2).sum(), "not a mean that"),
    "a penalty times a mean": (
        lambda self, b: loss_of(self, b) * self.hidden.weight.pow(2).sum(),
        "mul is applied to a",
    ),
    "a penalty without a contract": (
        lambda self, b: loss_of(self, b) + self.hidden.weight.norm(),
        r"norm applied to the parameter hidden\.weight.*pow\(2\), abs",
    ),
    "a class out of range": (
        lambda self, b: F.cross_entropy(self(b[0]), b[1].clone().fill_(CLASSES)),
        r"target\[0\] = 5 is outside \[0, 5\)",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_a_sum_of_means_is_refused(name):
    build, message = LOSSES[name]
    with pytest.raises((UncoveredError, InputError), match=message):
        fit(network(lambda self, batch, batch_idx: build(self, batch)))


def scaled_by_mean(self, batch):
    items = per_item(self, batch)
    return (items / items.detach().mean()).mean()


def centred_input(self, batch):
    x, y = batch
    return F.cross_entropy(self(x - x.mean()), y)


def centred_activation(self, batch):
    h = self.hidden(batch[0])
    return F.cross_entropy(self.output(h - h.detach().mean()), batch[1])


def detached_loss(self, batch):
    loss = loss_of(self, batch)
    return (per_item(self, batch) * loss.detach()).mean()


def through_memory(self, batch):
    memory = torch.zeros(2)
    memory[0] = batch[0].mean() * 2
    return F.cross_entropy(self(batch[0] * memory[0]), batch[1])


def without_gradient(self, batch):
    with torch.no_grad():
        weight = loss_of(self, batch) + 1
    return (per_item(self, batch) * weight).mean()


def centred_target(self, batch):
    target = batch[0][:, :CLASSES]
    return F.mse_loss(self(batch[0]), target - target.mean())


def largest(self, batch):
    x, y = batch
    return F.cross_entropy(self(x / x.abs().max()), y)


def largest_of_each_feature(self, batch):
    x, y = batch
    return F.cross_entropy(self(x / x.abs().max(0).values), y)


def mixed_up(self, batch):
    x, y = batch
    return F.cross_entropy(self(x * 0.7 + x.flip(0) * 0.3), y)


def shuffled(self, batch):
    x, y = batch
    return F.cross_entropy(self(x[torch.argsort(y)]), y)


def from_the_first(self, batch):
    x, y = batch
    return F.cross_entropy(self(x - x[0]), y)


def scaled_by_the_last(self, batch):
    x, y = batch
    return F.cross_entropy(self(x * (x[-1:, :1] + 0.5)), y)


def into_a_buffer(self, batch):
    self.centre.mul_(0.9).add_(batch[0].mean())
    return loss_of(self, batch)


@pytest.mark.parametrize(
    "loss",
    [
        scaled_by_mean,
        centred_input,
        centred_activation,
        detached_loss,
        through_memory,
        without_gradient,
        centred_target,
        largest,
        largest_of_each_feature,
        mixed_up,
        shuffled,
        from_the_first,
        scaled_by_the_last,
        into_a_buffer,
    ],
)
def test_a_mean_over_the_micro_batch_may_not_enter_the_loss_without_its_gradient(loss):
    class Centred(Network):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            return loss(self, batch)

    with pytest.raises(UncoveredError, match=r"is applied to a mean, an extreme .* It may be logged"):
        fit(Centred)


def test_a_backward_of_the_users_own_takes_what_several_passes_need():
    def training_step(self, batch, batch_idx):
        return loss_of(self, batch) + per_item(self, batch).mean()

    def narrow(self, loss):
        loss.backward()

    def wide(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)

    with pytest.raises(
        UncoveredError, match=r"backward does not take retain_graph\. Write backward\(self, loss, \*args"
    ):
        fit(network(training_step, backward=narrow))
    assert fit(network(training_step, backward=wide)).weights == fit(network(training_step)).weights
