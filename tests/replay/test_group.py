"""The group of workers: results of rank 0, errors with their rank, and no wait for a worker that is gone."""

import os
import signal
import time

import pytest
import torch

from det_lightning.errors import DetError
from det_lightning.replay import replay
from det_lightning.replay.group import worker_group
from tests.claims.processes import PATIENCE_SECONDS, Failed, in_new_process
from tests.replay import recorded


def place(rank: int, world_size: int, port: int, *arguments):
    return rank, world_size, arguments, os.getpid()


def fail(rank: int, world_size: int, port: int, failing: int, how: str):
    if rank == failing and how == "raise":
        raise ValueError(f"planted on rank {rank}")
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10 * PATIENCE_SECONDS)


def two_orders():
    with worker_group(3) as group:
        first = group.run(place, 3, "a", 1)
        second = group.run(place, 2)
    return first, second, os.getpid()


def failing_order(failing: int, how: str) -> str:
    with pytest.raises(DetError) as raised, worker_group(2) as group:
        group.run(fail, 2, failing, how)
    assert how == "kill" or "Traceback" in raised.value.__notes__[0]
    return str(raised.value)


def test_rank_0_answers_and_workers_are_used_again():
    first, second, caller = in_new_process(two_orders)
    assert first[:3] == (0, 3, ("a", 1)) and second[:3] == (0, 2, ())
    assert first[3] == second[3] != caller


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_names_its_rank_and_the_others_are_not_waited_for(failing):
    message = in_new_process(failing_order, failing, "raise")
    assert message == f"rank {failing} of 2 failed: ValueError: planted on rank {failing}"
    assert f"rank {failing} of 2 failed" in in_new_process(failing_order, failing, "kill")


def replay_after_threads(folder) -> bool:
    """A caller that has used several threads forks workers that have none of them."""
    recorded.record(folder)
    (torch.randn(700, 700) @ torch.randn(700, 700)).relu().exp().sum()
    return replay(folder / "ledger", world=2).matched


def test_a_caller_that_has_used_threads_can_replay_at_any_world_size(tmp_path):
    assert in_new_process(replay_after_threads, tmp_path, threads=4)


def test_an_error_in_one_rank_of_a_replay_is_told(tmp_path):
    in_new_process(recorded.record, tmp_path)
    with pytest.raises(Failed, match="the data set is gone"):
        in_new_process(replay, tmp_path / "ledger", world=2, entry="tests.replay.recorded:build_that_raises")
