"""Optimizers, precisions, Trainer arguments and loaders that would break the promise are refused."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from det_lightning.errors import InputError, UncoveredError
from det_lightning.strategies.given_ranks import free_port
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.trainings import Network, Run, Split, spread_samples, train
from tests.layers.fitting import fit, loss_of


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"trainer": {"overfit_batches": 0.3}},
            InputError,
            "limit_train_batches=0.3 of 2 optimizer steps is less than one",
        ),
        ({"split": Split(1, 4, 3), "trainer": {"limit_train_batches": 4}}, InputError, "inside an optimizer step of 3"),
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


def test_a_schedule_that_lightning_counts_in_micro_batches_is_refused_where_there_are_several():
    class Scheduled(Network):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]

    assert fit(Scheduled, steps=4, samples=48).rates == [0.1, 0.05, 0.05, 0.025]
    with pytest.raises(UncoveredError, match=r'ExponentialLR has "interval": "step" and "frequency": 2.*micro-batches'):
        fit(Scheduled, split=Split(1, 6, 2))


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
def test_an_accumulation_that_is_set_during_the_training_is_refused(hook):
    def change(self, *args):
        self.trainer.accumulate_grad_batches = 3 - self.trainer.accumulate_grad_batches

    def build():
        return type("Changing", (Network,), {hook: change})()

    for split in (Split(1, 12, 1), Split(1, 6, 2)):
        with pytest.raises(
            UncoveredError, match=r"accumulate_grad_batches was set to .*\[GradientAccumulationScheduler"
        ):
            fit(build, split=split, steps=4, samples=48)
