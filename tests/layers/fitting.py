"""Two steps of a small training in this process, and the networks that the tests of refusals make variants of."""

import torch
import torch.nn.functional as F
from torch import nn

from det_lightning.strategies.given_ranks import free_port
from tests.claims.trainings import CLASSES, HIDDEN, Network, Run, Split, train


def fit(build, **options):
    """Two steps with one rank in this process."""
    run = {"split": Split(1, 12, 1), "steps": 2, "samples": 24, **options}
    return train(0, 1, free_port(), Run(build=build, **run))


def network(training_step, **attributes):
    """() -> a Network with this training_step."""
    return type("Network", (Network,), {"training_step": training_step, **attributes})


def loss_of(self, batch):
    x, y = batch
    return F.cross_entropy(self(x), y)


def per_item(self, batch):
    return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Scaled(Network):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.single = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.ones(12, CLASSES))
