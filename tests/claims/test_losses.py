"""Every covered loss trains to the same bytes at every split, ignored and uneven items included."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.claims.processes import on_ranks
from tests.claims.trainings import CLASSES, FEATURES, Network, Run, Split, train

SPLITS = [Split(1, 12, 1), Split(1, 3, 4), Split(2, 3, 2), Split(3, 4, 1)]


class Regression(Network):
    """The network's outputs against real targets under a loss chosen by name."""

    loss_name = "mse_loss"

    def training_step(self, batch, batch_idx):
        x, y = batch
        return getattr(F, self.loss_name)(self(x), y)


class Probabilities(Network):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self(x), y) + 0.25 * F.mse_loss(self(x), y)


class Ignoring(Network):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, ignore_index=2)


class L1(Regression):
    loss_name = "l1_loss"


class SmoothL1(Regression):
    loss_name = "smooth_l1_loss"


class Huber(Regression):
    loss_name = "huber_loss"


def real_targets(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=generator), torch.rand(count, CLASSES, generator=generator)
    )


@pytest.mark.parametrize("build", [Regression, L1, SmoothL1, Huber, Probabilities, Ignoring], ids=lambda c: c.__name__)
def test_the_loss_and_the_weights_do_not_depend_on_the_split(build):
    data = {} if build is Ignoring else {"data": real_targets}
    outcomes = [
        on_ranks(split.world_size, train, Run(split=split, steps=7, samples=40, build=build, **data))[0]
        for split in SPLITS
    ]
    for outcome in outcomes[1:]:
        assert outcome.weights == outcomes[0].weights
        assert outcome.losses == outcomes[0].losses
    assert len(set(outcomes[0].weights)) == 8
