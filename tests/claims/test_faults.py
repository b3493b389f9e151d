"""What goes wrong on one rank stops all of them, with a message that says what and where.

Cases C06, C58, C59, and ranks that are lost.
"""

import os
import signal
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from det_lightning.strategies.given_ranks import free_port
from tests.claims.processes import PATIENCE_SECONDS, Background, Failed, on_ranks
from tests.claims.test_world_size import reference
from tests.claims.trainings import Network, Run, Split, train


class Flip(Callback):
    """Flips one bit of a weight on one rank, after a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.output.weight.view(torch.int32)[2, 3] ^= 1 << 18


TWO = pytest.param(2, r"ranks \[0, 1\] differ", marks=pytest.mark.slow)


@pytest.mark.parametrize(("world", "who"), [(3, "rank 1 differs"), TWO])
def test_C59_a_flipped_bit_stops_the_run_at_that_step_and_is_named(world, who):
    run = Run(split=Split(world, 24 // world, 1), steps=6, callbacks=(Flip(),))
    with pytest.raises(Failed, match=rf"{who} from the others in output\.weight \[5, 16\] after optimizer step 3"):
        on_ranks(world, train, run)


def test_without_the_check_the_ranks_drift_apart():
    run = Run(split=Split(2, 12, 1), steps=6, callbacks=(Flip(),), options={"check_replicas": False})
    first, second = on_ranks(2, train, run)
    assert first.weights[1] == second.weights[1] and first.weights[-1] != second.weights[-1]


class Dies(Callback):
    """One rank is killed before its backward pass, or before its optimizer step."""

    def __init__(self, where: str):
        self.where = where

    def _die(self, trainer, where):
        if where == self.where and trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_before_backward(self, trainer, pl_module, loss):
        self._die(trainer, "backward")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._die(trainer, "optimizer step")


DOING = {"backward": "gradients were added up", "optimizer step": "weights were compared"}


@pytest.mark.parametrize("where", ["backward", pytest.param("optimizer step", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_the_others_with_one_message(where, tmp_path):
    options = {"timeout": timedelta(seconds=PATIENCE_SECONDS)}
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = Run(
        split=Split(3, 8, 1),
        steps=6,
        callbacks=(saver, Dies(where)),
        options=options,
        trainer={"enable_checkpointing": True},
    )
    port = free_port()
    ranks = [Background(train, rank, 3, port, run) for rank in range(3)]
    try:
        for rank in (0, 2):
            with pytest.raises(Failed) as failure:
                ranks[rank].result()
            assert f"rank {rank} lost another rank while {DOING[where]}" in failure.value.message
            assert failure.value.kind == "LostRankError"
    finally:
        for rank in ranks:
            rank.end()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]


class Terminated(Callback):
    """SIGTERM in the second of three micro-batches of the fifth step."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 4 and trainer.fit_loop.batch_idx % 3 == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_termination_within_a_step_loses_and_doubles_nothing(world, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=100, filename="saved")
    run = Run(
        split=Split(world, 8 // world, 3),
        steps=9,
        callbacks=(saver, Terminated()),
        trainer={"enable_checkpointing": True},
    )
    with pytest.raises(Failed):
        on_ranks(world, train, run)
    resumed = on_ranks(1, train, Run(split=Split(1, 12, 2), steps=9, resume=tmp_path / "saved.ckpt"))[0]
    begun = len(resumed.weights) - 1
    assert begun in (5, 4) and resumed.global_step == 9
    assert resumed.weights == reference(9).weights[9 - begun :]


class Slow(Network):
    """Every rank takes its own time in every layer."""

    def training_step(self, batch, batch_idx):
        import random
        import time

        time.sleep(random.Random(self.trainer.global_rank * 100 + batch_idx).random() * 0.02)
        return super().training_step(batch, batch_idx)


def test_C58_delays_move_no_bit():
    assert on_ranks(3, train, Run(split=Split(3, 4, 2), steps=9, build=Slow))[0].weights == reference(9).weights


class Uneven(Network):
    """Two means that have unlike numbers of items on one rank only, hence other backward passes than on the other."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        part = logits if self.trainer.global_rank == 0 else logits[:, :1]
        return part.mean() + logits[:, 0].mean()


def test_ranks_with_unlike_losses_stop_with_an_error_instead_of_waiting_for_each_other():
    with pytest.raises(Failed, match="micro-batches of one step made their losses unlike"):
        on_ranks(2, train, Run(split=Split(2, 12, 1), steps=2, build=Uneven))
