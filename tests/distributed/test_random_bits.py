"""Philox against the published vectors, and permutations made of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.distributed.random_bits import counters, permutation, philox, uniform_float32
from det_lightning.errors import InputError

# kat_vectors of Random123: counter, key (low word first), result of Philox4x32-10.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = st.integers(0, 2**64 - 1)


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_published_vectors(counter, key, expected):
    low, high = (int(word) for word in words(key))
    result = philox(low | high << 32, words(counter))
    assert result.dtype == np.uint32
    assert result.tolist() == words(expected).tolist()


@given(seed=SEEDS, shape=st.lists(st.integers(0, 3), max_size=3))
def test_each_counter_stands_alone(seed, shape):
    table = np.random.default_rng(1).integers(0, 2**32, (*shape, 4), dtype=np.uint32)
    whole = philox(seed, table)
    assert whole.shape == table.shape
    for place in np.ndindex(*shape):
        assert philox(seed, table[place]).tolist() == whole[place].tolist()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(InputError, match=str(seed)):
        philox(seed, np.zeros(4, dtype=np.uint32))


@pytest.mark.parametrize(
    "counter", [np.zeros(3, dtype=np.uint32), np.zeros(4, dtype=np.int64), np.zeros((4, 2), np.uint32)]
)
def test_a_counter_of_another_form_is_refused(counter):
    with pytest.raises(InputError, match="uint32"):
        philox(0, counter)


def test_counters_put_the_index_first():
    assert counters(3, 7, 8).tolist() == [[0, 7, 8, 0], [1, 7, 8, 0], [2, 7, 8, 0]]


@given(seed=SEEDS, count=st.integers(0, 200), epoch=st.integers(0, 2**31))
def test_a_permutation_holds_every_index_once_and_is_a_function_of_seed_and_epoch(seed, count, epoch):
    order = permutation(seed, count, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert permutation(seed, count, epoch).tolist() == order.tolist()


def test_permutations_of_other_seeds_and_epochs_are_others():
    orders = {tuple(permutation(seed, 50, epoch)) for seed in (0, 1, 2**32, 2**63) for epoch in range(5)}
    assert len(orders) == 20


def test_every_place_is_as_likely_for_every_index():
    """Counts over 2,000 epochs of 8 samples; the bound is six standard deviations of a fair count."""
    hits = np.zeros((8, 8), dtype=int)
    for epoch in range(2000):
        hits[permutation(3, 8, epoch), np.arange(8)] += 1
    assert np.abs(hits - 250).max() < 6 * np.sqrt(2000 * 1 / 8 * 7 / 8)


def test_the_first_permutation_is_pinned():
    """A change of these numbers is a change of every shuffled run."""
    assert permutation(2026, 10, 0).tolist() == [5, 0, 4, 8, 2, 3, 7, 9, 1, 6]


def test_uniform_floats_are_multiples_of_a_power_of_two_in_range():
    values = uniform_float32(5, (40, 25), 3)
    assert values.shape == (40, 25) and values.dtype == np.float32
    scaled = values.astype(np.float64) * 2**23
    assert (scaled == np.rint(scaled)).all()
    assert values.min() >= -1 and values.max() < 1
    assert abs(values.mean()) < 0.1
    assert not (values == uniform_float32(5, (40, 25), 4)).all()
