"""A group of worker processes that runs one training after another: a process that has imported Lightning is dear."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from det_lightning.distributed.waiting import tells_of_another_rank
from det_lightning.errors import DetError
from det_lightning.strategies.given_ranks import free_port

_CAUSE_SECONDS = 10  # for the next answer, once a rank has said that it lost another


def _work(rank: int, orders: Connection, threads: int, inherited: list[Connection]) -> None:
    """Runs each order; answers ("result", value), ("error", (last words, traceback)), or "lost" in place of "error" where
    the error only tells of another rank. It ends with the process that gives the orders: `inherited`, which a fork has of
    that process's ends, are closed, so that nobody else keeps them open."""
    for connection in inherited:
        connection.close()
    torch.set_num_threads(threads)
    while (order := _next_order(orders)) is not None:
        function, arguments = order
        try:
            orders.send(("result", function(rank, *arguments)))
        except BaseException as error:
            kind = "lost" if tells_of_another_rank(error) else "error"
            orders.send((kind, (last_words(error), traceback.format_exc())))


def _next_order(orders: Connection) -> Any:
    try:
        return orders.recv()
    except (EOFError, ConnectionError):
        return None


def last_words(error: BaseException) -> str:
    """What an exception says, without where it came from."""
    return "".join(traceback.format_exception_only(error)).strip()


def error_from_elsewhere(message: str, where_from: str) -> DetError:
    """An error of another process: its message in one sentence, its traceback as a note, which --debug shows."""
    error = DetError(message)
    error.add_note(where_from)
    return error


class Group:
    """Workers 0 .. size - 1; a training runs on the first `world_size` of them."""

    def __init__(self, connections: list[Connection]):
        self._connections = connections

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
        """Calls function(rank, world_size, port, *arguments) on each rank and returns what rank 0 returned.

        Args:
            function: importable by name; the ranks meet at the loopback `port` (strategies/given_ranks.py).

        Raises:
            DetError: a rank raised or ended; the message says what it raised, a note its traceback. What a rank says of
                another that it lost is told only where no rank says more. The group is then not to be used again.
        """
        ranks = self._connections[:world_size]
        port = free_port()
        for connection in ranks:
            connection.send((function, (world_size, port, *arguments)))
        answers, waiting, lost = {}, list(ranks), None
        while waiting and (ready := wait(waiting, timeout=None if lost is None else _CAUSE_SECONDS)):
            for connection in ready:
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    kind, value = "error", ("the process ended without an answer", "")
                if kind != "result":
                    said, where_from = value
                    message = f"rank {ranks.index(connection)} of {world_size} failed: {said}"
                    failure = error_from_elsewhere(message, where_from)
                    if kind == "error":
                        raise failure
                    lost = lost or failure
                answers[connection] = value
                waiting.remove(connection)
        if lost is not None:
            raise lost
        return answers[ranks[0]]


@contextmanager
def worker_group(size: int, *, on_gpus: bool = False, threads: int = 1) -> Iterator[Group]:
    """`size` workers of `threads` threads each, ended when the block is left. Forked where that is sound, so that imports
    are paid once: not for work on GPUs, since CUDA does not survive a fork, nor for several threads, since a fork has none
    of those that its parent started, and waiting for them would hang."""
    forked = sys.platform == "linux" and not on_gpus and threads == 1
    context = multiprocessing.get_context("fork" if forked else "spawn")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    workers, connections = [], []
    try:
        for rank in range(size):
            here, there = context.Pipe()
            inherited = [*connections, here] if forked else []
            # No daemon: a rank's DataLoader may have processes of its own.
            worker = context.Process(target=_work, args=(rank, there, threads, inherited))
            worker.start()
            there.close()
            workers.append(worker)
            connections.append(here)
        yield Group(connections)
        for connection in connections:
            connection.send(None)
        for worker in workers:
            worker.join(timeout=10)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.kill()
