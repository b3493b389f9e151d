"""The promise: an IterableDataset that declares its length and can start anywhere is cut like any other data set, at every
world size, with any number of workers, and across a resume within an epoch.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from det_lightning.errors import InputError
from det_lightning.ledger.store import LedgerReader
from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import Background, Failed, on_ranks
from tests.claims.test_resume import assert_continues
from tests.claims.test_world_size import assert_same_training
from tests.claims.trainings import Network, Run, Split, spread_samples, train
from tests.strategies.small_fits import trainer_of

SAMPLES = 46


class InOrder(IterableDataset):
    """Samples as they lie in a file."""

    def __init__(self, count: int):
        self.x, self.y = spread_samples(count).tensors

    def __len__(self):
        return len(self.x)

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self.x))

    def iter_from(self, epoch, index):
        for place in self.order(epoch)[index:].tolist():
            yield self.x[place], self.y[place]

    def __iter__(self):
        return self.iter_from(0, 0)


class Reshuffled(InOrder):
    """A new order each epoch, of its own making."""

    def order(self, epoch):
        return np.random.default_rng([7, epoch]).permutation(len(self.x))


class Short(InOrder):
    """Has fewer samples than it says."""

    def __len__(self):
        return len(self.x) + 1


class Drawing(InOrder):
    """Draws from the global generator."""

    def iter_from(self, epoch, index):
        for sample in super().iter_from(epoch, index):
            torch.rand(1)
            yield sample


RUN = Run(split=Split(1, 12, 1), samples=SAMPLES, steps=11, data=Reshuffled, validation=9, options={"global_batch": 12})


@cache
def whole():
    return train(0, 1, free_port(), RUN)


def test_a_stream_in_the_order_of_a_data_set_is_trained_like_that_data_set():
    stream = train(0, 1, free_port(), replace(RUN, data=InOrder))
    assert_same_training(stream, train(0, 1, free_port(), replace(RUN, data=spread_samples)))
    assert stream.logged == train(0, 1, free_port(), replace(RUN, data=spread_samples)).logged
    assert stream.weights[1] != whole().weights[1]


@pytest.mark.parametrize(
    ("split", "loader"),
    [
        (Split(1, 1, 5), {"num_workers": 3}),
        (Split(2, 1, 2), {"num_workers": 1, "persistent_workers": True}),
        (Split(3, 1, 1), {"num_workers": 2}),
        (Split(3, 1, 5), {}),
    ],
    ids=str,
)
def test_ranks_and_workers_read_exactly_their_samples(split, loader, tmp_path):
    outcomes = on_ranks(split.world_size, train, replace(RUN, split=split, loader=loader, ledger=tmp_path / "ledger"))
    assert_same_training(outcomes[0], whole())
    assert outcomes[0].logged == whole().logged
    train(0, 1, free_port(), replace(RUN, ledger=tmp_path / "reference"))
    ours, theirs = (LedgerReader(tmp_path / name) for name in ("ledger", "reference"))
    for step in range(RUN.steps + 1):
        assert ours.record(step).agree == theirs.record(step).agree
    assert len({theirs.record(step).agree["sample_ids"] for step in (1, 2, 3, 4)}) == 4


@pytest.mark.parametrize("stop", [6, 8])
def test_a_stream_goes_on_within_an_epoch_at_another_split(tmp_path, stop):
    stopped = replace(RUN, split=Split(2, 1, 2), steps=stop, checkpoint=tmp_path / "stopped.ckpt")
    on_ranks(2, train, stopped)
    assert_continues(train(0, 1, free_port(), replace(RUN, resume=tmp_path / "stopped.ckpt")), whole(), stop)


def test_a_stream_is_opened_once_while_the_slices_lie_side_by_side():
    opened = []

    class Opened(InOrder):
        def iter_from(self, epoch, index):
            opened.append((epoch, index))
            return super().iter_from(epoch, index)

    train(0, 1, free_port(), replace(RUN, data=Opened, validation=None, split=Split(1, 1, 3)))
    assert opened == [(0, 0), (1, 0), (2, 0)]


def test_a_stream_that_ends_early_is_named():
    run, port = replace(RUN, data=Short, validation=None, split=Split(2, 6, 1)), free_port()
    ranks = [Background(train, rank, 2, port, run) for rank in range(2)]
    with pytest.raises(Failed, match="Short declares 47 samples, but its iter_from ended before sample 46 of epoch 0"):
        ranks[1].result()
    with pytest.raises(Failed, match="rank 0 lost another rank"):
        ranks[0].result()
    with pytest.raises(InputError, match="Short declares 47 samples"):
        train(0, 1, free_port(), replace(RUN, data=Short, validation=None, loader={"num_workers": 1}))


def test_a_stream_that_draws_from_a_global_generator_is_refused():
    with pytest.raises(Exception, match="drew from the global generator of torch"):
        train(0, 1, free_port(), replace(RUN, data=Drawing, validation=None))


def test_the_stock_loader_gives_a_stream_to_every_worker_whole():
    """The control: without the strategy, two workers read everything twice unless the data set looks which it is."""
    assert len(list(DataLoader(InOrder(SAMPLES), batch_size=None, num_workers=2))) == 2 * SAMPLES


class Predicting(Network):
    def predict_step(self, batch, batch_idx):
        return batch[1]


def predict(rank, world_size, port) -> list[int]:
    rows = trainer_of(rank, world_size, port).predict(Predicting(), DataLoader(InOrder(9), batch_size=2))
    return torch.cat(rows).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_predicting_shows_every_sample_of_a_stream_once(world_size):
    rows = [row for rank in on_ranks(world_size, predict) for row in rank]
    assert sorted(rows) == sorted(InOrder(9).y.tolist())
