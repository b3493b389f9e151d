"""The group of workers: results of rank 0, errors with their rank, and no wait for a worker that is gone."""

import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import DetError, LostRankError
from det_lightning.replay import group, replay
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


def leave(rank: int, world_size: int, port: int, leaving: int, explained: bool, how: str):
    """One rank lets go of the others some time before it says why; they notice at once."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    dist.barrier()
    if rank == leaving:
        dist.destroy_process_group()
        time.sleep(1)
        fail(rank, world_size, port, leaving, how)
    with other_ranks("numbers were added up") if explained else nullcontext():
        dist.all_reduce(torch.ones(1))


def lose_a_rank(rank: int, world_size: int, port: int, losing: tuple[int, ...]):
    if rank not in losing:
        time.sleep(10 * PATIENCE_SECONDS)
    raise LostRankError(f"rank {rank} lost another rank")


def two_orders():
    with worker_group(3) as workers:
        first = workers.run(place, 3, "a", 1)
        second = workers.run(place, 2)
    return first, second, os.getpid()


def message_of(function, *arguments, cause_seconds: float = group._CAUSE_SECONDS) -> str:
    group._CAUSE_SECONDS = cause_seconds  # of this process, which is new
    with pytest.raises(DetError) as raised, worker_group(2) as workers:
        workers.run(function, 2, *arguments)
    return str(raised.value)


def failing_order(failing: int, how: str) -> str:
    with pytest.raises(DetError) as raised, worker_group(2) as workers:
        workers.run(fail, 2, failing, how)
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


@pytest.mark.parametrize("explained", [True, False])
@pytest.mark.parametrize("leaving", [0, 1])
def test_the_rank_that_failed_is_named_before_one_that_only_lost_it(leaving, explained):
    message = in_new_process(message_of, leave, leaving, explained, "raise")
    assert message == f"rank {leaving} of 2 failed: ValueError: planted on rank {leaving}"


def test_a_rank_that_was_killed_is_named_before_one_that_only_lost_it():
    message = in_new_process(message_of, leave, 1, True, "kill")
    assert message == "rank 1 of 2 failed: the process ended without an answer"


@pytest.mark.parametrize("losing", [(0, 1), (1,)], ids=["by every rank", "by one, and the other never answers"])
def test_where_no_rank_says_more_than_that_another_was_lost_that_is_told(losing):
    message = in_new_process(message_of, lose_a_rank, losing, cause_seconds=1)
    assert re.fullmatch(
        r"rank (\d) of 2 failed: det_lightning\.errors\.LostRankError: rank \1 lost another rank", message
    )


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


def load(rank: int, world_size: int, port: int) -> list[int]:
    loader = torch.utils.data.DataLoader(range(6), batch_size=3, num_workers=2)
    return [int(each) for batch in loader for each in batch]


def order_of_loading():
    with worker_group(2) as workers:
        return workers.run(load, 2)


def test_a_rank_may_load_its_data_with_processes_of_its_own():
    assert in_new_process(order_of_loading) == list(range(6))


def tell_pid(rank: int, world_size: int, port: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))


def end_between_two_orders(folder: Path) -> None:
    with worker_group(2) as workers:
        workers.run(tell_pid, 2, folder)
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_the_process_that_gives_their_orders(tmp_path):
    with pytest.raises((Failed, EOFError)):
        in_new_process(end_between_two_orders, tmp_path)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """A zombie, which waits for its parent only, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
