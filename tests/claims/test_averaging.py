"""Averages of weights over a run: the same bytes at every split and after a resume."""

from dataclasses import replace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from det_lightning.replay.run import QUIET_TRAINER
from det_lightning.strategies.given_ranks import free_port, given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import on_ranks
from tests.claims.trainings import Network, Run, Split, bytes_of, spread_samples, train


class Averaged(Network):
    """Keeps the bytes of what the callback leaves in the module at the end."""

    def on_fit_end(self):
        self.left = bytes_of(self)


def averaged(rank, world_size, port, run: Run, make):
    module = Averaged()
    outcome = train(rank, world_size, port, replace(run, build=lambda: module, callbacks=(make(),)))
    return outcome, module.left


def ema():
    return EMAWeightAveraging(decay=0.9, update_every_n_steps=2)


def swa():
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)


RUN = Run(split=Split(1, 12, 1), samples=48, steps=-1, trainer={"max_epochs": 4}, loader={"shuffle": True})


@pytest.mark.parametrize("make", [ema, swa], ids=lambda make: make.__name__)
def test_an_average_does_not_depend_on_the_split(make):
    outcome, left = averaged(0, 1, free_port(), RUN, make)
    assert left != outcome.weights[-1], "an average is not the last step's weights"
    for split in (Split(1, 4, 3), Split(2, 3, 2)):
        other, others_left = on_ranks(split.world_size, averaged, replace(RUN, split=split), make)[0]
        assert (other.weights, others_left) == (outcome.weights, left)


def test_an_exponential_average_goes_on_after_a_resume(tmp_path):
    whole, left = averaged(0, 1, free_port(), RUN, ema)
    saving = replace(RUN, save_every=6, checkpoint=tmp_path / "last.ckpt")
    assert averaged(0, 1, free_port(), saving, ema)[1] == left
    resumed, others_left = averaged(
        0, 1, free_port(), replace(RUN, split=Split(1, 6, 2), resume=tmp_path / "step=6.ckpt"), ema
    )
    assert others_left == left
    assert resumed.weights[-1] == whole.weights[-1]


def first_half(count: int):
    return TensorDataset(*(part[: count // 2] for part in spread_samples(count).tensors))


def test_overfitting_a_few_batches_takes_the_same_ones_each_epoch():
    run = replace(RUN, trainer={"max_epochs": 3, "overfit_batches": 2})
    outcome = train(0, 1, free_port(), run)
    plain = train(0, 1, free_port(), replace(RUN, data=first_half, loader={}, trainer={"max_epochs": 3}))
    assert outcome.weights == plain.weights and outcome.global_step == 6


def test_a_search_for_a_batch_size_is_refused_by_lightning_itself():
    """Here the batch size moves no bit of the training: any that fits will do."""
    strategy = DetStrategy(cluster_environment=given_ranks(0, 1, free_port()))
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=2, callbacks=[BatchSizeFinder()], **QUIET_TRAINER)
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        trainer.fit(Network(), DataLoader(spread_samples(24), batch_size=12))
