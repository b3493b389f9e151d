"""A user's own sampler keeps its order, at every split and across a resume; none is replaced silently.

Cases C26, C28 and samplers by length and token budget.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from det_lightning.distributed.listed_order import Listing, listed_order
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import Failed, on_ranks
from tests.claims.test_resume import assert_continues
from tests.claims.trainings import Network, Run, Split, spread_samples, train

LENGTHS = [3, 9, 1, 4, 4, 7, 2, 8, 5, 6] * 4


class TokenBudget(Sampler):
    """Batches of samples of like length whose lengths add up to at most 20, in a new order each epoch."""

    def __init__(self, shuffle: bool = True):
        self.shuffle = shuffle

    def __iter__(self):
        batches, batch = [], []
        for index in sorted(range(len(LENGTHS)), key=lambda i: (LENGTHS[i], i)):
            if batch and (len(batch) + 1) * LENGTHS[index] > 20:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
        order = torch.randperm(len(batches)).tolist() if self.shuffle else range(len(batches))
        return iter([batches[place] for place in order])

    def __len__(self):
        return 1  # wrong on purpose: nothing relies on it


class Told(Sampler):
    """A sampler that is told its epoch, as distributed ones are, and draws from NumPy."""

    epoch = 0

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __iter__(self):
        return iter(((np.random.permutation(30) + self.epoch) % 40).tolist())

    def __len__(self):
        return 30


class Sampled(Network):
    """Its own loader, so that it goes to other processes as a class."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make(spread_samples(40))


def by_budget(data):
    return DataLoader(data, batch_sampler=TokenBudget())


def told(data):
    return DataLoader(data, batch_size=4, sampler=Told())


def weighted(data):
    return DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0, 5.0] * 20, 30))


def own_generator(data):
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))


class Build:
    def __init__(self, make):
        self.make = make

    def __call__(self):
        return Sampled(self.make)


def run_of(make, split: Split, **options) -> Run:
    return Run(split=split, build=Build(make), loaders=[], options={"seed": 6}, **{"steps": 26, **options})


def fit(rank, world_size, port, run: Run):
    return train(rank, world_size, port, replace(run, loaders=run.build().train_dataloader()))


@pytest.mark.parametrize(
    "make",
    [by_budget, told, *(pytest.param(make, marks=pytest.mark.slow) for make in (weighted, own_generator))],
    ids=lambda make: make.__name__,
)
def test_C26_a_samplers_order_is_kept_at_every_split_and_resume(make, tmp_path):
    options = {} if make is by_budget else {"options": {"seed": 6, "global_batch": 8}}
    whole = fit(0, 1, free_port(), replace(run_of(make, Split(1, 8, 1)), **options))
    assert len(set(whole.weights)) == 27
    split = replace(run_of(make, Split(2, 2, 2), steps=15, checkpoint=tmp_path / "stopped.ckpt"), **options)
    assert on_ranks(2, fit, split)[0].weights == whole.weights[:16]
    resumed = replace(run_of(make, Split(1, 2, 3), resume=tmp_path / "stopped.ckpt"), **options)
    assert_continues(fit(0, 1, free_port(), resumed), whole, 15)


def test_C28_every_sample_of_an_epoch_comes_once():
    order = listed_order(
        Listing(TokenBudget(), batched=True, seed=1),
        global_batch=None,
        drop_last=False,
        most_steps=None,
        arrangement=None,
    )
    for epoch in (0, 1, 5):
        steps = [order.step(epoch, step).tolist() for step in range(order.steps)]
        assert sorted(index for step in steps for index in step) == list(range(40))
        assert all(sum(LENGTHS[i] for i in step) <= 20 for step in steps)
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert order.global_batch == max(map(len, steps)) == 8


def test_listing_leaves_the_generators_as_they_were():
    torch.manual_seed(3)
    np.random.seed(4)
    expected = torch.rand(2), np.random.rand(2)
    torch.manual_seed(3)
    np.random.seed(4)
    first, again, other = (Listing(Told(), batched=False, seed=seed)(2)[0].tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.rand(2), expected[0]) and (np.random.rand(2) == expected[1]).all()


class OfThisRank(Sampler):
    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(range(rank, 40, 2))

    def __len__(self):
        return 20


def apart(data):
    return DataLoader(data, batch_size=4, sampler=OfThisRank())


def test_a_sampler_that_lists_a_ranks_own_share_is_refused():
    with pytest.raises(Failed, match="OfThisRank lists other samples on another rank"):
        on_ranks(2, fit, run_of(apart, Split(2, 4, 1), steps=2))


def test_another_budget_does_not_continue_a_checkpoint(tmp_path):
    fit(0, 1, free_port(), run_of(by_budget, Split(1, 8, 1), steps=3, checkpoint=tmp_path / "stopped.ckpt"))

    def by_length(data):
        return DataLoader(data, batch_sampler=TokenBudget(shuffle=False))

    with pytest.raises(Exception, match="the checkpoint was saved with listing = "):
        fit(0, 1, free_port(), run_of(by_length, Split(1, 8, 1), resume=tmp_path / "stopped.ckpt"))


def test_a_random_order_of_the_stock_loader_is_another_at_each_start():
    """The control: without the strategy a sampler draws from whatever state the process is in."""
    orders = [list(DataLoader(range(40), sampler=RandomSampler(range(40)))) for _ in range(2)]
    assert [int(x) for x in orders[0]] != [int(x) for x in orders[1]]
