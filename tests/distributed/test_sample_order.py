"""Which samples a step takes, and how they are cut: every sample exactly once, whatever the split."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.distributed.sample_order import SampleOrder, Slice, cut
from det_lightning.distributed.slice_loader import SliceSampler
from det_lightning.errors import InputError

SMALL = st.integers(1, 9)


@given(samples=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_a_cut_is_contiguous_complete_and_even(samples, parts):
    edges = [cut(samples, parts, part) for part in range(parts)]
    assert edges[0][0] == 0 and edges[-1][1] == samples
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    sizes = {last - first for first, last in edges}
    assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1
    assert all(abs(Fraction(samples * part, parts) - first) < 1 for part, (first, _) in enumerate(edges))


@given(samples=st.integers(1, 60), global_batch=st.integers(1, 70), drop_last=st.booleans(), shuffle=st.booleans())
def test_the_steps_of_an_epoch_take_every_sample_once(samples, global_batch, drop_last, shuffle):
    order = SampleOrder(samples, global_batch, seed=3, shuffle=shuffle, drop_last=drop_last)
    taken = [order.step(2, step).tolist() for step in range(order.steps)]
    assert all(len(step) == global_batch for step in taken[:-1])
    flat = [index for step in taken for index in step]
    assert len(flat) == len(set(flat))
    assert len(flat) == (samples - samples % global_batch if drop_last else samples)
    if not shuffle:
        assert flat == list(range(len(flat)))


@given(
    samples=st.integers(1, 40),
    global_batch=st.integers(1, 45),
    world_size=SMALL,
    accumulate=SMALL,
    start=st.integers(0, 3),
    arrangement=st.one_of(st.none(), st.integers(0, 5)),
)
def test_the_ranks_and_micro_batches_of_a_step_hold_its_samples_exactly_once(
    samples, global_batch, world_size, accumulate, start, arrangement
):
    order = SampleOrder(samples, global_batch, seed=1, arrangement=arrangement)
    seen: dict[int, list[int]] = {step: [] for step in range(min(start, order.steps), order.steps)}
    for rank in range(world_size):
        sampler = SliceSampler(order, world_size=world_size, rank=rank, accumulate=accumulate)
        slices = list(sampler.slices(4, start))
        assert len(sampler) == order.steps * accumulate
        assert len(slices) == len(seen) * accumulate, "all ranks run the same number of micro-batches"
        for here, indices in slices:
            assert indices, "an empty slice loads a sample that stands in"
            assert (len(indices) == 1) if here.empty else (len(indices) == here.positions[1] - here.positions[0])
            if not here.empty:
                seen[here.step] += indices
    for step, indices in seen.items():
        assert sorted(indices) == sorted(order.step(4, step).tolist())
        if arrangement is None:
            assert indices == order.step(4, step).tolist(), "in the order of positions, rank by rank"


def test_the_stock_sampler_fails_the_same_check():
    """DistributedSampler repeats samples where the length does not divide."""
    from torch.utils.data.distributed import DistributedSampler

    seen = [index for rank in range(3) for index in DistributedSampler(range(10), 3, rank, shuffle=False)]
    assert sorted(seen) != list(range(10))


@given(steps_done=st.integers(0, 60), limit=st.one_of(st.none(), st.integers(1, 20)))
def test_the_place_in_an_epoch_follows_from_the_steps_done(steps_done, limit):
    order = SampleOrder(58, 12, seed=1, most_steps=limit)
    sampler = SliceSampler(order, world_size=2, rank=1, accumulate=3, steps_done=lambda: steps_done)
    steps = 5 if limit is None else min(limit, 5)
    assert len(sampler) == 3 * steps
    assert sampler.place() == (steps_done // steps, steps_done % steps)
    assert list(sampler) == [indices for _, indices in sampler.slices(*sampler.place())]


def test_epochs_and_seeds_have_orders_of_their_own_and_an_arrangement_has_none():
    order = SampleOrder(50, 10, seed=1)
    orders = {tuple(each) for each in (order.epoch(0), order.epoch(1), SampleOrder(50, 10, seed=2).epoch(0))}
    assert len(orders) == 3
    arranged = SampleOrder(50, 10, seed=1, arrangement=4)
    assert arranged.step(0, 2).tolist() == order.step(0, 2).tolist()
    assert sorted(arranged.arranged(order.step(0, 2), 2)) == sorted(order.step(0, 2))
    assert arranged.arranged(order.step(0, 2), 2).tolist() != order.step(0, 2).tolist()
    assert np.array_equal(order.arranged(order.step(0, 2), 2), order.step(0, 2))


def test_empty_slices_say_so():
    assert Slice(0, 0, (3, 3)).empty and not Slice(0, 0, (3, 4)).empty


@pytest.mark.parametrize(("samples", "global_batch"), [(0, 4), (4, 0), (-1, 1)])
def test_an_order_of_nothing_is_refused_with_both_numbers(samples, global_batch):
    with pytest.raises(InputError, match=f"got {samples} samples and a global batch of {global_batch}"):
        SampleOrder(samples, global_batch)
