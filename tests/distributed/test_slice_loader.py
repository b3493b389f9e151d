"""The loader of a rank: its batches are its slices, it says which, and the digests of samples add up over any split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler, is_shuffled
from det_lightning.ledger.digest import value_digest
from tests.claims.trainings import spread_samples

DATA = spread_samples(23)


def loaders(world_size: int, accumulate: int, digest=value_digest, global_batch: int = 10, **options):
    order = SampleOrder(len(DATA), global_batch, seed=6)
    for rank in range(world_size):
        sampler = SliceSampler(order, world_size=world_size, rank=rank, accumulate=accumulate)
        yield SliceLoader(DataLoader(DATA, batch_size=4, **options), sampler, digest)


def digests_of_steps(world_size: int, accumulate: int) -> list[int]:
    totals = [0, 0, 0]
    for loader in loaders(world_size, accumulate):
        for _ in loader:
            totals[loader.current.step] += loader.current_digest
    return [total % 2**64 for total in totals]


@settings(max_examples=25)
@given(world_size=st.integers(1, 6), accumulate=st.integers(1, 6))
def test_the_digests_of_a_steps_samples_do_not_depend_on_the_split(world_size, accumulate):
    assert digests_of_steps(world_size, accumulate) == digests_of_steps(1, 1)


def test_they_do_depend_on_every_bit_of_every_sample():
    reference = digests_of_steps(2, 2)
    DATA.tensors[0].view(torch.int32)[17, 3] ^= 1
    changed = digests_of_steps(2, 2)
    DATA.tensors[0].view(torch.int32)[17, 3] ^= 1
    assert sum(ours != theirs for ours, theirs in zip(changed, reference, strict=True)) == 1


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 4}])
def test_the_current_slice_is_that_of_the_batch_in_hand_and_not_of_one_prefetched(options):
    (loader,) = loaders(1, 4, digest=None, **options)
    order = loader.slice_sampler.order
    for x, _ in loader:
        here = loader.current
        indices = order.step(here.epoch, here.step)[slice(*here.positions)]
        assert here.empty or torch.equal(x, DATA.tensors[0][indices.tolist()])
        assert loader.current_digest is None


def test_the_users_settings_are_taken_over_and_the_batch_size_is_not():
    def collate(items):
        return torch.stack([x for x, _ in items])

    (loader,) = loaders(1, 1, collate_fn=collate, digest=None)
    assert [len(batch) for batch in loader] == [10, 10, 3]
    (loader,) = loaders(1, 1, num_workers=1, persistent_workers=True, prefetch_factor=3, timeout=7)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor, loader.timeout) == (1, True, 3, 7)


def test_two_passes_with_persistent_workers_follow_the_steps_done():
    done = 0
    order = SampleOrder(len(DATA), 10, seed=6)
    sampler = SliceSampler(order, world_size=1, rank=0, accumulate=1, steps_done=lambda: done)
    loader = SliceLoader(DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True), sampler)
    for done in (0, 3, 7):
        steps = [(loader.current.epoch, loader.current.step, batch[0]) for batch in loader]
        assert [place[:2] for place in steps] == [(done // 3, step) for step in range(done % 3, 3)]
        for epoch, step, x in steps:
            assert torch.equal(x, DATA.tensors[0][order.step(epoch, step)])


def test_an_empty_slice_loads_the_first_sample_and_has_no_digest():
    *_, last = loaders(4, 1, global_batch=10)
    lengths = [
        (len(batch[0]), loader.current.empty, loader.current_digest == 0) for loader in [last] for batch in loader
    ]
    assert lengths == [(3, False, False), (3, False, False), (1, False, False)]
    first, *_ = loaders(4, 1, global_batch=10)
    assert [(len(batch[0]), first.current.empty, first.current_digest == 0) for batch in first][-1] == (1, True, True)


def test_lightning_sees_a_loader_that_resumes():
    (loader,) = loaders(1, 1)
    assert loader.state_dict() == {}
    loader.load_state_dict({})


def test_what_is_shuffled():
    assert is_shuffled(DataLoader(DATA, shuffle=True))
    assert not is_shuffled(DataLoader(DATA))
    assert not is_shuffled(DataLoader(TensorDataset(torch.zeros(3))))
