"""What has no contract is refused by name, with a way out; what has one is not refused."""

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from det_lightning.errors import InputError, UncoveredError
from det_lightning.ops.means import exact_mean
from det_lightning.strategies.given_ranks import free_port
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.trainings import CLASSES, FEATURES, HIDDEN, Network, Run, Split, spread_samples, train


def fit(build, **options):
    """Two steps with one rank in this process."""
    run = {"split": Split(1, 12, 1), "steps": 2, **options}
    return train(0, 1, free_port(), Run(build=build, samples=24, **run))


def network(training_step, **attributes):
    """() -> a Network with this training_step."""
    return type("Network", (Network,), {"training_step": training_step, **attributes})


# Modules


class Nested(Network):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.encoder = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), layer)})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 1, 1),
        nn.BatchNorm1d(4),
        nn.LayerNorm(4),
        nn.AlphaDropout(0.5),
        nn.Embedding(3, 3),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(2, 2),
        nn.Sigmoid(),
        nn.LazyLinear(3),
        nn.CosineEmbeddingLoss(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_module_without_a_contract_is_refused_by_its_path(layer):
    module = Nested(layer)
    with pytest.raises(UncoveredError) as refusal:
        fit(lambda: module)
    message = str(refusal.value)
    assert f"  encoder.blocks.1: {type(layer).__name__}\n" in message
    assert "encoder.blocks.0" not in message
    assert "CrossEntropyLoss, Dropout" in message and 'strategy="ddp"' in message
    assert type(module.encoder["blocks"][0]) is nn.Linear, "the model is to be as it was"


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4)], ids=lambda layer: type(layer).__name__)
def test_C49_statistics_over_a_batch_are_refused_by_the_modules_path(layer):
    with pytest.raises(UncoveredError, match=rf"encoder\.blocks\.1: {type(layer).__name__}"):
        fit(lambda: Nested(layer))


def test_all_modules_without_a_contract_are_named_at_once():
    module = Nested(nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.GELU()))
    with pytest.raises(UncoveredError, match=r"blocks\.1\.0: Tanh\n.*blocks\.1\.2: GELU"):
        fit(lambda: module)


# Calls in training_step


def loss_of(self, batch):
    x, y = batch
    return F.cross_entropy(self(x), y)


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


# Parameters outside linear layers


class Scaled(Network):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.single = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.ones(12, CLASSES))


PARAMETER_USES = {
    "sin": lambda self, x, h, y: torch.sin(self.scale),
    "softmax": lambda self, x, h, y: self.scale.softmax(0),
    "einsum": lambda self, x, h, y: torch.einsum("ij,j->i", h, self.scale),
    "cat": lambda self, x, h, y: torch.cat([h, self.scale.unsqueeze(0)]),
    "where": lambda self, x, h, y: torch.where(h > 0, h, self.scale),
    "getitem": lambda self, x, h, y: self.table[y],
    "embedding": lambda self, x, h, y: F.embedding(y, self.table),
    "setitem": lambda self, x, h, y: h.new_zeros(12, HIDDEN).__setitem__(0, self.scale),
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


# Gradients through broadcasts, and things that hide them


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

    with pytest.raises(UncoveredError, match=r"test_refusals\.Doubled is an autograd function"):
        fit(network(training_step))


def swish(x):
    return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_calls_do_not_show_is_seen_in_the_graph_of_the_loss():
    scripted = torch.jit.script(swish)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.output(scripted(self.hidden(batch[0]))), batch[1])

    with pytest.raises(UncoveredError, match=r"goes through SigmoidBackward0.* TorchScript"):
        fit(network(training_step))


def test_autocast_to_float16_is_refused():
    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", dtype=torch.float16):
            return loss_of(self, batch)

    with pytest.raises(UncoveredError, match=r"torch\.autocast to torch\.float16.*bf16-mixed"):
        fit(network(training_step))


@pytest.mark.parametrize("draw", [lambda x: torch.randn(x.shape), lambda x: torch.rand_like(x.t()[:5])])
def test_random_augmentation_after_the_transfer_is_refused_without_samples(draw):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            draw(batch[0])
        return batch

    build = type("Augmenting", (Network,), {"on_after_batch_transfer": on_after_batch_transfer})
    with pytest.raises(
        UncoveredError, match=r"called in the LightningModule itself .*(samples in dimension 0|movedim)"
    ):
        fit(build)


def test_what_a_hook_does_to_a_batch_is_seen_or_refused():
    def before(self, batch, dataloader_idx):
        return (batch[0] * torch.rand(()), batch[1]) if self.trainer.training else batch

    def in_place(self, batch, batch_idx):
        batch[0].mul_(2.0)

    def covered(self, batch, dataloader_idx):
        return batch[0] * 2.0, batch[1]

    with pytest.raises(UncoveredError, match="random call rand, called in the LightningModule itself"):
        fit(type("Before", (Network,), {"on_before_batch_transfer": before}))
    with pytest.raises(UncoveredError, match="changed in on_train_batch_start"):
        fit(type("InPlace", (Network,), {"on_train_batch_start": in_place}))
    module = type("Covered", (Network,), {"on_before_batch_transfer": covered})()
    assert fit(lambda: module).weights[1] != fit(Network).weights[1]
    assert "_on_before_batch_transfer" not in module.__dict__


class NoisyData(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.data = spread_samples(count)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.rand(()), y


def test_random_augmentation_in_the_data_set_is_refused_in_training_and_not_in_validation():
    with pytest.raises(UncoveredError, match="drew from the global generator of torch"):
        fit(Network, data=NoisyData)

    class Validating(Network):
        def val_dataloader(self):
            return DataLoader(NoisyData(9), batch_size=4)

    fit(Validating, trainer={"num_sanity_val_steps": 1})


def test_random_numbers_for_a_constant_are_refused_also_where_it_has_as_many_rows_as_the_batch():
    class Noisy(Network):
        def __init__(self):
            super().__init__()
            self.register_buffer("levels", torch.zeros(12, FEATURES))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0] + torch.rand_like(self.levels)), batch[1])

    with pytest.raises(
        UncoveredError, match=r"random numbers for a constant of shape \[12, 12\].* belongs to a sample"
    ):
        fit(Noisy)


def test_a_buffer_with_as_many_rows_as_the_batch_is_not_taken_for_samples():
    class Normed(Network):
        def __init__(self):
            super().__init__()
            self.register_buffer("levels", torch.linspace(1, 2, 12 * FEATURES).view(12, FEATURES))

        def training_step(self, batch, batch_idx):
            largest = self.levels.max(0).values
            return F.cross_entropy(self(batch[0] / largest * self.levels[3]), batch[1])

    assert len(set(fit(Normed).weights)) == 3


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


# Losses


def per_item(self, batch):
    return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


LOSSES = {
    "a mean of means": (lambda self, b: torch.stack([loss_of(self, b), loss_of(self, b)]).mean(), "stack is applied"),
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


def test_a_constant_that_depends_on_the_size_of_a_micro_batch_is_found_where_sizes_differ():
    def training_step(self, batch, batch_idx):
        return loss_of(self, batch) * len(batch[0])

    options = {"split": Split(1, 4, 3), "options": {"global_batch": 11}}
    with pytest.raises(UncoveredError, match=r"A constant that depends on the size of the batch is such a case"):
        fit(network(training_step), **options)


def test_micro_batches_with_unlike_losses_are_refused():
    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        return loss + loss_of(self, batch) if batch_idx == 1 else loss

    with pytest.raises(UncoveredError, match=r"micro-batches of one step made their losses unlike"):
        train(0, 1, free_port(), Run(split=Split(1, 4, 3), build=network(training_step), samples=24, steps=2))


# Optimizers, precision, Trainer


def optimized(make):
    return type("Optimized", (Network,), {"configure_optimizers": lambda self: make(self.parameters())})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), r"optim\.rmsprop\.RMSprop .*Covered, by exact type: .*torch\.optim\.SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), r"SGD\(fused=True\)"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), r"SGD\(differentiable=True\)"),
        (lambda p: type("MySGD", (torch.optim.SGD,), {})(p, lr=0.1), r"MySGD has no sequence"),
        (lambda p: torch.optim.LBFGS(p), r"LBFGS has no sequence"),
    ],
)
def test_an_optimizer_without_a_sequence_is_refused(make, message):
    with pytest.raises(UncoveredError, match=message):
        fit(optimized(make))


def test_parameters_in_float64_are_refused():
    with pytest.raises((UncoveredError, InputError), match="float64"):
        fit(lambda: Network().double())


class Iterator_(Network):
    def training_step(self, dataloader_iter):
        return loss_of(self, next(dataloader_iter)[0])


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_another_precision_is_refused(precision):
    with pytest.raises((UncoveredError, InputError), match=r"precision plugin .* \(precision=.*32-true"):
        fit(Network, trainer={"precision": precision})


def test_C24_C25_mixed_float16_is_refused_since_its_loss_scaling_leaves_steps_out():
    with pytest.raises(UncoveredError, match=r"16-mixed.*loss scaling leaves steps out.*bf16-mixed"):
        DetStrategy().precision_plugin = MixedPrecision("16-mixed", "cpu")


def test_a_training_step_that_takes_the_iterator_is_refused():
    with pytest.raises(UncoveredError, match=r"training_step\(dataloader_iter\)"):
        fit(Iterator_)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trainer": {"overfit_batches": 0.5}}, InputError, "limit_train_batches=0.5"),
        ({"split": Split(1, 4, 3), "trainer": {"limit_train_batches": 4}}, InputError, "inside an optimizer step of 3"),
        ({"trainer": {"limit_train_batches": 0.5}}, InputError, "limit_train_batches=0.5"),
        ({"callbacks": (GradientAccumulationScheduler({1: 2}),)}, InputError, "from 12 samples to 24"),
        ({"options": {"global_batch": 0}}, InputError, "global_batch must be at least 1, got 0"),
    ],
)
def test_a_trainer_that_would_break_the_promise_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        train(0, 1, free_port(), Run(**{"split": Split(1, 12, 1), "samples": 24, "steps": 2, **options}))


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(*spread_samples(24).tensors, strict=True)


class Stateful(torch.utils.data.Sampler):
    """Lists something new each time, whatever it is told."""

    def __init__(self):
        self.first = 0

    def __iter__(self):
        self.first += 1
        return iter(range(self.first, 12))

    def __len__(self):
        return 12


class OwnLoader(DataLoader):
    pass


SOME = TensorDataset(*spread_samples(24).tensors)
LOADERS = {
    "a sampler with a state": (DataLoader(SOME, 4, sampler=Stateful()), UncoveredError, "Stateful lists other samples"),
    "a batch sampler with a state": (
        DataLoader(SOME, batch_sampler=BatchSampler(Stateful(), 4, False)),
        UncoveredError,
        "BatchSampler lists other samples",
    ),
    "no samples": (DataLoader(SOME, 4, sampler=[]), UncoveredError, "lists no samples"),
    "no batches": (DataLoader(SOME, batch_size=None), UncoveredError, "batch_size=None"),
    "a stream": (DataLoader(Endless(), 4), UncoveredError, "Endless is an IterableDataset"),
    "a subclass": (OwnLoader(SOME, 4), UncoveredError, "got a OwnLoader"),
    "several loaders": ({"a": DataLoader(SOME, 4), "b": DataLoader(SOME, 4)}, UncoveredError, "one DataLoader, got 2"),
    "a list": ([1, 2, 3], UncoveredError, "DataLoader, got"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_whose_order_cannot_be_cut_is_refused(name):
    loader, error, message = LOADERS[name]
    build = type("Loading", (Network,), {"training_step": lambda self, batch, batch_idx: loss_of(self, batch)})
    with pytest.raises(error, match=message):
        train(0, 1, free_port(), Run(build=build, steps=2, loaders=loader))


class Unfreezes(Network):
    def __init__(self, at: int):
        super().__init__()
        self.at = at
        self.hidden.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.hidden.requires_grad_(batch_idx >= self.at)


class Freezes(Network):
    def on_train_batch_start(self, batch, batch_idx):
        self.output.bias.requires_grad_(batch_idx % 3 != 2)


def test_a_parameter_that_is_frozen_within_a_step_is_named():
    with pytest.raises(UncoveredError, match=r"output\.bias was frozen or removed between two micro-batches"):
        fit(Freezes, split=Split(1, 4, 3))


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


def test_a_layer_may_be_unfrozen_between_two_steps_and_not_within_one():
    split = Split(1, 4, 3)
    with pytest.raises(UncoveredError, match=r"hidden\.bias was unfrozen between two micro-batches"):
        fit(lambda: Unfreezes(1), split=split)
    module = Unfreezes(3)
    before = module.hidden.weight.clone()
    three, one = fit(lambda: module, split=split), fit(lambda: Unfreezes(1))
    assert three.weights == one.weights and not torch.equal(before, module.hidden.weight)
    assert fit(lambda: Unfreezes(99)).weights[1] == one.weights[1] != one.weights[2]


# What is covered


def everything(self, batch, batch_idx):
    """Uses every kind of call that a training_step may make."""
    x, y = batch
    h = self.hidden(x)
    h = torch.cat([h[:, :8], h[:, 8:]], dim=1).reshape(-1, 4, 4).transpose(1, 2).flatten(1)
    h = F.relu(h, inplace=True) + h.detach() * 0.5
    h = h * (h > 0.01) - torch.zeros_like(h)
    h = F.linear(h, self.square.weight) / 2.0
    assert not torch.zeros_like(self.square.weight).any() and self.square.weight.numel() == HIDDEN**2
    parts = h.new_zeros(len(h), HIDDEN)
    parts[:, :4] = h[:, :4]
    logits = self.output(torch.stack([h, parts]).unbind(0)[0])
    loss = F.cross_entropy(logits, y)
    auxiliary = self.criterion(self.output(F.relu(h)), y)
    with torch.no_grad():
        x = x / x.abs().max(1, keepdim=True).values + self.levels[y].unsqueeze(1)
        accuracy = (logits.argmax(1) == y).float().mean()
        assert accuracy.item() <= 1 and not torch.isnan(loss)
    self.log("accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True, on_step=True, on_epoch=True)
    self.log("loss", loss, sync_dist=True)
    self.log_dict({"auxiliary": auxiliary, "n": float(len(x))}, on_epoch=True, on_step=False)
    self.log("detached", 1.0 - torch.stack([loss.detach(), accuracy]).mean() * 2)
    total = 0
    total += 0.5 * loss
    total += sum([auxiliary, loss / 3, -0.1 * loss.float()])
    return {"loss": total, "seen": len(x)}


class Everything(Network):
    training_step = everything

    def __init__(self):
        super().__init__()
        self.square = nn.Linear(HIDDEN, HIDDEN)
        self.tied = nn.Linear(HIDDEN, HIDDEN)
        self.tied.weight = self.square.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.criterion = nn.CrossEntropyLoss()
        self.register_buffer("levels", torch.zeros(12))
        self.rectify = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.square.weight.copy_(torch.eye(HIDDEN))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9, foreach=True)


def test_what_is_covered_is_accepted_and_trains():
    module = Everything()
    unused, frozen = module.unused.weight.clone(), module.frozen.weight.clone()
    outcome = fit(lambda: module)
    assert len(set(outcome.weights)) == 3
    assert {"accuracy", "accuracy_step", "accuracy_epoch", "loss", "auxiliary", "n"} <= set(outcome.logged)
    assert torch.equal(module.unused.weight, unused) and torch.equal(module.frozen.weight, frozen)
    assert module.tied.weight is module.square.weight


STEPS = {
    "view": lambda h: h.view(6, 2, -1),
    "reshape": lambda h: h.t().reshape(-1),
    "flatten": lambda h: h.t().flatten(),
    "unflatten": lambda h: h.unflatten(1, (4, 4)),
    "view_as": lambda h: h.view_as(h) + h.reshape_as(h),
    "permute": lambda h: h.permute(1, 0).contiguous(),
    "transposes": lambda h: h.t() + h.T + h.mT + h.transpose(0, 1) + h.swapaxes(0, 1) + h.movedim(0, 1),
    "squeeze": lambda h: h.unsqueeze(1).squeeze(1) + h.unsqueeze(0).squeeze(),
    "clone": lambda h: h.clone() + h.positive(),
    "casts": lambda h: h.bfloat16().float() + h.half().to(torch.float32) + h.to(torch.float64).float(),
    "slices": lambda h: h[:, None, ..., 3] + h.narrow(1, 0, 10).select(1, 2).unsqueeze(1),
    "splits": lambda h: h.chunk(4, 1)[1] + h.split(4, 1)[2] + h.split([4, 12], 1)[0],
    "unbind": lambda h: torch.stack(h.unbind(1), dim=1),
    "joins": lambda h: torch.cat([h, torch.hstack([h[:, :8], h[:, 8:]]), torch.vstack([h[:6], h[6:]])]),
    "arithmetic": lambda h: -(1.0 - h * 2.0) / (h * h + 3.0) - torch.sub(h, 1) + h / (1.0 + h * h),
    "in place": lambda h: h.clone().mul_(2.0).add_(h).sub_(1.0).div_(3.0).neg_(),
    "ravel": lambda h: h.ravel(),
    "choices": lambda h: torch.where(h > 0, h, -2.0 * h) + h.masked_fill(h > 0.1, 0.0) + h.where(h < 0, 0.5),
    "part without gradient": lambda h: h * h.detach() + h.data,
    "keywords": lambda h: F.relu(input=F.linear(input=h, weight=torch.eye(HIDDEN), bias=None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_covered_call_has_a_covered_backward_pass(name):
    """What the list of calls lets pass, the list of the graph's steps lets pass as well."""

    def training_step(self, batch, batch_idx):
        return STEPS[name](self.hidden(batch[0])).mean()

    assert len(set(fit(network(training_step)).weights)) == 3


def test_a_model_of_plain_layers_is_accepted_without_changes():
    class Plain(Network):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Unflatten(1, (3, 4)), nn.Identity(), nn.Flatten(), nn.Linear(FEATURES, 8), nn.ReLU(inplace=True)
            )
            self.head = nn.Linear(8, CLASSES, bias=False)

        def forward(self, x):
            return self.head(self.layers(x))

    outcome = fit(Plain)
    assert len(set(outcome.weights)) == 3


def test_evaluation_runs_what_training_refuses():
    class Evaluating(Network):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self.log("sum", F.cross_entropy(logits, y, reduction="sum"), reduce_fx="sum")
            self.log("smooth", F.cross_entropy(logits, y, label_smoothing=0.1))
            self.log("confidence", logits.softmax(1).max(1).values.double().mean())
            self.log("norm", logits.norm(dim=1).mean(0))

    outcome = fit(Evaluating, validation=9)
    assert {"sum", "smooth", "confidence", "norm"} <= set(outcome.logged)


def test_only_the_lightningmodule_of_a_fit_is_changed():
    assert isinstance(Network(), LightningModule) and type(Network().hidden) is nn.Linear
