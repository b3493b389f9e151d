"""A collate function that computes from several samples, or moves them, is refused; one that pads at the end is not."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, default_collate

from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler
from det_lightning.errors import UncoveredError
from tests.claims.trainings import Network, Split
from tests.layers.fitting import fit

GENERATOR = torch.Generator().manual_seed(4)
SEQUENCES = [torch.randn(1 + 5 * number % 7, 3, generator=GENERATOR) for number in range(12)]


def batches(collate, data=SEQUENCES, **options):
    sampler = SliceSampler(SampleOrder(len(data), 6), world_size=1, rank=0, accumulate=1)
    return list(SliceLoader(DataLoader(data, batch_size=6, collate_fn=collate, **options), sampler, may_draw=False))


def padded(samples, *, front: bool = False):
    most = max(map(len, samples))
    sides = [(most - len(x), 0) if front else (0, most - len(x)) for x in samples]
    return torch.stack([F.pad(x, (0, 0, *side)) for x, side in zip(samples, sides, strict=True)])


def padded_in_front(samples):
    return padded(samples, front=True)


def sorted_by_length(samples):
    return padded(sorted(samples, key=len, reverse=True))


def normalised(samples):
    x = padded(samples)
    return x - x.mean(0)


def mixed(samples):
    x = padded(samples)
    return {"x": 0.7 * x + 0.3 * x.flip(0)}


def with_the_longest(samples):
    return padded(samples), torch.full((len(samples),), max(map(len, samples)))


def joined(samples):
    return [x - samples[0].mean() for x in samples]


def masked_by_a_generator_of_its_own(samples):
    x = padded(samples)
    return x * (torch.rand(len(x), 1, 1, generator=GENERATOR) > 0.5)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "collate",
    [padded_in_front, sorted_by_length, normalised, mixed, with_the_longest, joined, masked_by_a_generator_of_its_own],
)
def test_a_sample_that_depends_on_its_neighbours_is_refused(collate, workers):
    with pytest.raises(
        UncoveredError, match=rf"the collate function {collate.__name__} gives sample \d of a micro-batch"
    ):
        batches(collate, num_workers=workers)


def with_lengths_and_masks(samples):
    lengths = torch.tensor([len(x) for x in samples])
    places = torch.arange(int(lengths.max()))
    return {"x": padded(samples), "length": lengths, "mask": places < lengths[:, None], "names": ["a"] * len(samples)}


def lists_of_samples(samples):
    return samples, [len(x) for x in samples], [x.numpy() for x in samples]


def end_to_end(samples):
    return torch.cat(samples), torch.tensor([0, *(len(x) for x in samples)]).cumsum(0)


def time_first(samples):
    return padded(samples).movedim(0, 1)


def that_empties_its_samples(samples):
    return default_collate([{"x": sample.pop("x"), "rest": len(sample)} for sample in samples])


def for_several_only(samples):
    first, second, *rest = samples
    return padded([first, second, *rest])


@pytest.mark.parametrize(
    "collate", [padded, with_lengths_and_masks, lists_of_samples, end_to_end, time_first, for_several_only, list]
)
def test_samples_that_are_put_side_by_side_are_accepted(collate):
    assert len(batches(collate)) == 2


def test_a_collate_function_may_empty_its_samples():
    class Fresh(list):
        def __getitem__(self, number):
            return {"x": SEQUENCES[number][:1], "y": number}

    first, _ = batches(that_empties_its_samples, data=Fresh(SEQUENCES))
    assert first["rest"].tolist() == [1] * 6


def minus_the_mean(samples):
    x, y = default_collate(samples)
    return x - x.mean(0), y


def test_a_training_is_refused_and_evaluation_is_not():
    with pytest.raises(UncoveredError, match="the collate function minus_the_mean"):
        fit(Network, loader={"collate_fn": minus_the_mean})
    with pytest.raises(UncoveredError, match="the collate function minus_the_mean"):
        fit(Network, loader={"collate_fn": minus_the_mean}, split=Split(1, 4, 3))
    sampler = SliceSampler(SampleOrder(12, 6), world_size=1, rank=0, accumulate=1)
    assert len(list(SliceLoader(DataLoader(SEQUENCES, batch_size=6, collate_fn=normalised), sampler))) == 2
