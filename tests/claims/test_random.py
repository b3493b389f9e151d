"""Random numbers, dropout and activation checkpointing move no bit with the split; seeds do.

Cases C01, C21, C34, C46, C47, C48.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import det_lightning.ops.random_calls
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import on_ranks
from tests.claims.test_resume import assert_continues
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import CLASSES, FEATURES, HIDDEN, Network, Outcome, Run, Split, train, train_each

random = det_lightning.ops.random_calls.random
SPLITS = {1: Split(1, 24, 1), 2: Split(2, 4, 3), 3: Split(3, 8, 1), 4: Split(4, 3, 2), 8: Split(1, 3, 8)}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(F.relu(self.inner(x)))


class Dropped(Network):
    """Dropout as a module and as a function, noise in the step and before it, some of it computed again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(HIDDEN) for _ in range(2)])
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + 0.1 * random.rand_like(x) if self.training else x, y

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.hidden(x + 0.01 * torch.randn_like(x))
        h = self.through_blocks(h)
        # A sequence of two places a sample, merged with the samples.
        pair = F.dropout(torch.stack([h, h * 0.5], dim=1), 0.2)
        flat = F.dropout(pair.flatten(0, 1), 0.1)
        h = flat.view(len(x), 2, HIDDEN)[:, 0] * random.bernoulli_like(h, 0.9)
        return F.cross_entropy(self.output(h), y)

    def through_blocks(self, h):
        for block in self.blocks:
            h = block(h)
        return h


class Checkpointed(Dropped):
    def through_blocks(self, h):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class Nested(Checkpointed):
    """Regions within a region: they are computed again twice."""

    def through_blocks(self, h):
        return checkpoint(super().through_blocks, h, use_reentrant=False)


RUN = Run(steps=10, build=Dropped, loader={"shuffle": True}, options={"global_batch": 24, "seed": 4}, samples=58)


@cache
def outcomes(world: int) -> dict[str, Outcome]:
    """Runs at a split, in one group of processes."""
    runs = {
        "plain": replace(RUN, split=SPLITS[world]),
        "checkpointed": replace(RUN, split=SPLITS[world], build=Checkpointed),
        "nested": replace(RUN, split=SPLITS[world], build=Nested),
    }
    ports = [free_port() for _ in runs]
    ranks = on_ranks(SPLITS[world].world_size, train_each, list(runs.values()), ports[1:])
    assert all(
        outcome.weights == first.weights for rank in ranks for outcome, first in zip(rank, ranks[0], strict=True)
    )
    return dict(zip(runs, ranks[0], strict=True))


@pytest.mark.parametrize("world", [2, 8, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_C01_C46_dropout_and_noise_do_not_depend_on_the_split(world):
    assert_same_training(outcomes(world)["plain"], outcomes(1)["plain"])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["checkpointed", "nested"])
def test_C47_activation_checkpointing_moves_no_bit(world, kind):
    assert_same_training(outcomes(world)[kind], outcomes(1)["plain"])


def here(run: Run) -> Outcome:
    return train(0, 1, free_port(), run)


def test_C46_samples_places_and_steps_have_masks_of_their_own():
    masks = []

    class Watching(Network):
        def training_step(self, batch, batch_idx):
            ones = torch.ones_like(self.hidden(batch[0]).detach())
            masks.append(F.dropout(ones, 0.5) > 0)
            masks.append(F.dropout(ones, 0.5) > 0)
            return super().training_step(batch, batch_idx)

    here(Run(split=SPLITS[1], steps=2, build=Watching))
    rows = [row.numpy().tobytes() for mask in masks for row in mask]
    assert len(set(rows)) > 0.99 * len(rows) == 0.99 * 4 * 24


def test_C48_two_seeds_give_two_trainings_from_the_same_samples():
    first, again, other = (
        here(replace(RUN, steps=2, loader={}, split=SPLITS[1], options={"seed": s})) for s in (1, 1, 2)
    )
    assert first.weights == again.weights
    assert first.weights[0] == other.weights[0] and first.weights[1] != other.weights[1]


def test_C21_C34_a_run_with_dropout_and_noise_goes_on_where_it_was_stopped(tmp_path):
    checkpoint_file = tmp_path / "stopped.ckpt"
    stopped = here(replace(RUN, split=SPLITS[8], steps=4, checkpoint=checkpoint_file))
    assert stopped.weights == outcomes(1)["plain"].weights[:5]
    resumed = here(replace(RUN, split=Split(1, 12, 2), build=Checkpointed, resume=checkpoint_file))
    assert_continues(resumed, outcomes(1)["plain"], 4)


def test_the_stock_strategy_fails_the_same_checks(tmp_path):
    stock = replace(RUN, strategy="ddp", options={}, split=SPLITS[1], samples=48)
    torch.manual_seed(1)
    whole = here(stock)
    torch.manual_seed(1)
    micro = here(replace(stock, split=Split(1, 8, 3)))
    assert whole.weights[0] == micro.weights[0]
    assert whole.weights[1] != micro.weights[1]


def test_a_mask_of_p_one_and_of_p_zero_and_evaluation():
    class Extremes(Network):
        def training_step(self, batch, batch_idx):
            h = self.hidden(batch[0])
            assert F.dropout(h, 0.0) is h and F.dropout(h, 0.5, training=False) is h
            assert not F.dropout(h, 1.0).any()
            dropped = F.dropout2d(h.view(len(h), 4, 2, 2), 0.5).flatten(2)
            assert ((dropped != 0).sum(2) * (dropped != 0).sum(2)).unique().tolist() in ([0, 16], [16])
            assert random.randint_like(h, 3, 5).unique().tolist() == [3, 4]
            return super().training_step(batch, batch_idx)

    assert CLASSES and FEATURES
    assert here(Run(split=SPLITS[1], steps=1, build=Extremes)).weights
