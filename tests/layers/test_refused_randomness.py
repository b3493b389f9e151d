"""Random numbers that belong to no sample, and changes of a batch that nothing sees, are refused."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from det_lightning.errors import UncoveredError
from tests.claims.trainings import FEATURES, Network, Split, spread_samples
from tests.layers.fitting import fit


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


def numpy_noise(batch):
    return batch[0] + torch.from_numpy(np.random.rand(*batch[0].shape).astype(np.float32)), batch[1]


def python_noise(batch):
    return batch[0] + torch.tensor([[random.random()] for _ in batch[0]]), batch[1]


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("training_step", "in training_step"),
        ("on_before_batch_transfer", "in on_before_batch_transfer"),
        ("transfer_batch_to_device", "in a hook that transfers a batch"),
        ("on_after_batch_transfer", "in a hook that transfers a batch"),
    ],
)
def test_numbers_of_other_libraries_are_refused_where_every_micro_batch_draws_them(hook, where):
    for noise, library in ((numpy_noise, r"numpy\.random"), (python_noise, "random")):

        def drawing(self, batch, *args, noise=noise):
            inner = getattr(super(type(self), self), hook)
            return inner(noise(batch) if self.trainer.training else batch, *args)

        with pytest.raises(UncoveredError, match=f"{where}.* the global generator of {library} was drawn from"):
            fit(type("Drawing", (Network,), {hook: drawing}))


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


def noise_on_gradients(self, *args, **kwargs):
    for parameter in self.parameters():
        parameter.grad.add_(torch.randn_like(parameter) * 0.01)


def noise_of_its_own_generator(self, *args, **kwargs):
    generator = torch.Generator().manual_seed(self.global_step)
    for parameter in self.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator) * 0.01)


class Langevin(torch.optim.Optimizer):
    """Steps with noise."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad + 0.01 * torch.randn_like(p))


class Sampled(Network):
    def configure_optimizers(self):
        return Langevin(self.parameters())


@pytest.mark.parametrize(
    ("build", "options", "where"),
    [
        (
            type("Noisy", (Network,), {"on_before_optimizer_step": noise_on_gradients}),
            {},
            "in on_before_optimizer_step",
        ),
        (type("Noisy", (Network,), {"configure_gradient_clipping": noise_on_gradients}), {}, "clipping"),
        (Sampled, {"stock_optimizers": True}, "while Langevin stepped"),
    ],
)
def test_random_numbers_of_a_step_are_refused_since_a_resumed_run_would_draw_others(build, options, where):
    with pytest.raises(UncoveredError, match=rf"{where}.* the global generator of torch .* where the run was resumed"):
        fit(build, options=options, trainer={"gradient_clip_val": None})


def test_random_numbers_of_a_step_may_come_from_a_generator_seeded_by_it():
    build = type("Noisy", (Network,), {"on_before_optimizer_step": noise_of_its_own_generator})
    assert fit(build, split=Split(1, 4, 3)).weights == fit(build).weights
