"""Matrices that stand apart, whose products go into windows at once, change no byte of a training at any split."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from det_lightning.distributed import local_sum
from det_lightning.distributed.buckets import BLOCK, LEAST_APART
from tests.claims.processes import on_ranks
from tests.claims.trainings import CLASSES, FEATURES, Network, Outcome, Run, Split, train_each

PRODUCTS: list[tuple[int, ...]] = []


class Wide(Network):
    """Uses a matrix as it is, another transposed, and a third in both ways and with a row that is added to all samples.

    Args:
        least: elements from which on matrices stand apart on a GPU and on a CPU; None: as usual.
    """

    def __init__(self, least: int | None):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.hidden, self.output = torch.nn.Linear(FEATURES, BLOCK), torch.nn.Identity()
        self.inner = torch.nn.Linear(BLOCK, 2 * BLOCK)
        self.back = torch.nn.Parameter(torch.empty(2 * BLOCK, BLOCK))
        self.tied = torch.nn.Parameter(torch.empty(CLASSES, BLOCK))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_((torch.rand(parameter.shape, generator=generator) - 0.5) / 8)
        self.least = least

    def setup(self, stage):
        if self.least is not None:
            LEAST_APART.update(cpu=self.least, cuda=self.least)
            kept = local_sum.add_gemm_windowed, local_sum.gemm_windowed

            def counted(function):
                return lambda *operands: PRODUCTS.append(operands[-1].shape) or function(*operands)

            local_sum.add_gemm_windowed, local_sum.gemm_windowed = map(counted, kept)

    def forward(self, x):
        x = self.hidden(x) + x[:, :CLASSES] @ self.tied + self.tied[1]
        x = F.relu(self.inner(F.relu(x))) @ self.back
        return F.linear(x, self.tied)

    def on_train_end(self):
        assert bool(PRODUCTS) == (self.least is not None)


def wide():
    return Wide(None)


def wide_apart():
    return Wide(1)


RUN = Run(build=wide, steps=6)


@cache
def usual() -> Outcome:
    return on_ranks(1, train_each, [RUN], [])[0][0]


@pytest.mark.parametrize("split", [Split(1, 24, 1), Split(1, 8, 3), Split(2, 6, 2), Split(3, 8, 1)], ids=str)
def test_windows_of_products_change_no_byte(split):
    (outcome,) = on_ranks(split.world_size, train_each, [replace(RUN, build=wide_apart, split=split)], [])[0]
    assert (outcome.weights, outcome.losses, outcome.optimizer) == (usual().weights, usual().losses, usual().optimizer)
    assert len(set(outcome.weights)) == RUN.steps + 1, "the weights move"
