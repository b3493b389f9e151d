"""Loading that draws from a global generator is refused, in this process and in workers; a generator of its own is not."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from det_lightning.distributed.random_guard import check, no_draws, states
from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler
from det_lightning.errors import UncoveredError

DRAWS = {
    "torch": lambda index: torch.rand(()).item(),
    "numpy.random": lambda index: np.random.rand(),
    "random": lambda index: random.random(),
}


class Drawing(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(self.draw(index))


def of_its_own(index: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(index)).item() + np.random.default_rng(index).random()


def batches(data, may_draw: bool = False, **options) -> list[torch.Tensor]:
    sampler = SliceSampler(SampleOrder(len(data), 4), world_size=1, rank=0, accumulate=2)
    return list(SliceLoader(DataLoader(data, batch_size=4, **options), sampler, may_draw=may_draw))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_a_global_generator_is_refused_by_its_name(name, workers):
    with pytest.raises(UncoveredError, match=rf"global generator of {name}\. "):
        batches(Drawing(DRAWS[name]), num_workers=workers)
    assert len(batches(Drawing(DRAWS[name]), may_draw=True, num_workers=workers)) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_the_samples_own_is_accepted(workers):
    first, second = (torch.cat(batches(Drawing(of_its_own), num_workers=n)) for n in (0, workers))
    assert torch.equal(first, second)


def test_a_draw_in_the_collate_function_is_refused():
    def collate(items):
        return torch.stack(items) * random.random()

    with pytest.raises(UncoveredError, match="generator of random"):
        batches(Drawing(float), collate_fn=collate)


def start(worker_id: int) -> None:
    torch.manual_seed(worker_id)
    random.seed(worker_id)


@pytest.mark.parametrize("options", [{}, {"worker_init_fn": start}, {"persistent_workers": True}])
def test_the_users_start_of_a_worker_may_seed(options):
    assert len(batches(Drawing(float), num_workers=2, **options)) == 4


def test_draws_between_batches_are_nobodys_business():
    sampler = SliceSampler(SampleOrder(8, 4), world_size=1, rank=0, accumulate=1)
    for _ in SliceLoader(DataLoader(Drawing(float), batch_size=4), sampler, may_draw=False):
        torch.rand(3), np.random.rand(), random.random()


def test_every_draw_changes_its_state_and_only_that():
    for name, draw in DRAWS.items():
        before = states()
        assert check(before) is None
        draw(0)
        now = states()
        assert [each for each in now if now[each] != before[each]] == [name]
    before = states()
    np.random.standard_normal()  # of a pair: the second is kept
    before = states()
    np.random.standard_normal()
    assert states()["numpy.random"] != before["numpy.random"]


@pytest.mark.parametrize("name", DRAWS)
def test_a_block_that_draws_is_refused_by_when_it_ran(name):
    refused = pytest.raises(UncoveredError, match=rf"^in a block the global generator of {name} was drawn from")
    with refused, no_draws("in a block"):
        DRAWS[name](0)
    with no_draws("in a block"):
        of_its_own(0)


def test_the_error_of_a_block_that_drew_is_not_hidden_by_the_refusal():
    with pytest.raises(ValueError, match="of the block's own") as raised, no_draws("in a block"):
        random.random()
        raise ValueError("of the block's own")
    assert raised.value.__context__ is None
