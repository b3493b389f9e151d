"""The promise: however a global batch is cut over ranks and micro-batches, every step has the same bytes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.claims.processes import on_ranks
from tests.claims.trainings import Network, Run, Split, spread_samples, train

SPLITS = [Split(1, 24, 1), Split(1, 8, 3), Split(2, 12, 1), Split(2, 4, 3), Split(3, 8, 1), Split(4, 6, 1)]
STEPS = 50


def trained(run: Run, threads: int = 1):
    """The outcome of a run, after seeing that all ranks agree on it."""
    outcomes = on_ranks(run.split.world_size, train, run, threads=threads)
    assert all(outcome.weights == outcomes[0].weights for outcome in outcomes), "the ranks drifted apart"
    return outcomes[0]


@cache
def reference(steps: int = STEPS):
    return trained(Run(split=SPLITS[0], steps=steps))


def assert_same_training(outcome, expected) -> None:
    steps = range(len(expected.weights))
    assert len(outcome.weights) == len(expected.weights)
    assert [step for step in steps if outcome.weights[step] != expected.weights[step]] == []
    assert outcome.losses == expected.losses
    assert outcome.optimizer == expected.optimizer
    assert (outcome.global_step, outcome.epoch) == (expected.global_step, expected.epoch)


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_C01_C11_C62_every_split_of_a_global_batch_gives_the_same_bytes_at_every_step(split):
    outcome = trained(Run(split=split, steps=STEPS))
    assert_same_training(outcome, reference())
    assert len(set(outcome.weights)) == STEPS + 1, "a step that changes nothing proves nothing"


def test_C01_stock_ddp_fails_the_same_check():
    outcomes = [trained(Run(split=split, strategy="ddp", steps=STEPS)) for split in (SPLITS[0], SPLITS[4])]
    assert outcomes[0].weights[0] == outcomes[1].weights[0]
    assert outcomes[0].weights[-1] != outcomes[1].weights[-1]
    first, second = (np.frombuffer(outcome.weights[-1], dtype=np.float32) for outcome in outcomes)
    assert np.abs(first - second).max() < 1e-4, "the same samples in the same steps: only roundings differ"


def test_two_seeds_give_two_trainings():
    shuffled = {"loader": {"shuffle": True}, "steps": 4}
    first, again, other = (trained(Run(**shuffled, options={"seed": seed})).weights for seed in (1, 1, 2))
    assert first == again
    assert first[0] == other[0]
    assert first[1] != other[1]


@pytest.mark.parametrize("split", [Split(2, 4, 3), Split(3, 8, 1)], ids=str)
def test_C18_dealing_the_samples_of_a_step_to_other_ranks_moves_no_bit(split):
    dealt = Run(split=split, steps=20, arrangement=11)
    assert_same_training(trained(dealt), reference(20))


def test_C56_threads_move_no_bit():
    assert_same_training(trained(Run(split=SPLITS[0], steps=20), threads=5), reference(20))
    assert_same_training(trained(Run(split=Split(2, 4, 3), steps=20), threads=3), reference(20))


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Run(samples=75, steps=6, options={"global_batch": 25}), "25 samples do not divide over 6 slices"),
        (Run(samples=58, steps=7, options={"global_batch": 24}), "the last step of an epoch has 10 samples"),
        (Run(samples=10, steps=6, options={"global_batch": 4}), "the last step leaves ranks without a sample"),
        (Run(samples=3, steps=4, options={"global_batch": 4}), "there are more ranks than samples"),
        (Run(samples=1, steps=3, options={"global_batch": 4}), "there is one sample"),
        (Run(samples=58, steps=5, options={"global_batch": 24}, loader={"drop_last": True}), "the rest is dropped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_C04_samples_that_cannot_be_cut_evenly_give_the_same_bytes(run, why):
    shuffled = replace(run, loader={"shuffle": True, **run.loader})
    expected = trained(replace(shuffled, split=Split(1, 1, 1)))
    for split in (Split(3, 1, 2), Split(4, 1, 1)):
        assert_same_training(trained(replace(shuffled, split=split)), expected)


class Tokens(Network):
    """A sample is a sequence: the mean runs over samples times places; linear layers see three dimensions."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.stack([x, x * 0.5, x - 1.0], dim=1)
        logits = self.output(F.relu(self.hidden(x), inplace=True))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.stack([y, y, y], dim=1).reshape(-1))


class TwoLosses(Network):
    """The same weights used twice in a step; one loss is scaled, the other added in place."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = 0
        for scale in (1.0, 0.3):
            loss += F.cross_entropy(self(x * scale), y) * scale
        return loss


class Adaptive(Network):
    """AdamW, which makes large steps of the smallest differences between gradients near zero."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, amsgrad=True)


@pytest.mark.parametrize("build", [Tokens, TwoLosses, Adaptive])
def test_sequences_sums_of_losses_and_adaptive_steps_give_the_same_bytes(build):
    expected = trained(Run(build=build, steps=8))
    for split in (Split(2, 4, 3), Split(3, 8, 1)):
        assert_same_training(trained(Run(build=build, split=split, steps=8)), expected)


@pytest.mark.parametrize("build", [Network, Tokens, TwoLosses, Adaptive])
def test_it_is_the_stock_training_up_to_rounding(build):
    """A check of gradients and denominators, not of bits: another loss or a wrong count would be far away."""
    # Lightning would shuffle for ddp, although the loader does not ask for it.
    run = Run(build=build, steps=8, data=ordinary_samples, trainer={"use_distributed_sampler": False})
    ours, theirs = (
        np.frombuffer(trained(replace(run, strategy=strategy, split=split)).weights[-1], dtype=np.float32)
        for strategy, split in (("det", Split(2, 4, 3)), ("ddp", Split(1, 24, 1)))
    )
    start = np.frombuffer(trained(replace(run, steps=1)).weights[0], dtype=np.float32)
    assert np.abs(ours - theirs).max() < 1e-5 < 1e-2 < np.abs(theirs - start).max()


def ordinary_samples(count: int):
    return spread_samples(count, spread=0)
