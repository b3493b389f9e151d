"""One group of worker processes that runs every configuration in turn: a process that has imported Lightning is dear."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from det_lightning.demo.runs import RunPlan, RunResult, train
from det_lightning.errors import DetError
from det_lightning.strategies.given_ranks import free_port


def _work(rank: int, orders: Connection) -> None:
    """Runs each order; answers ("result", RunResult or None) or ("error", traceback)."""
    while (order := orders.recv()) is not None:
        try:
            orders.send(("result", train(rank, *order)))
        except BaseException:
            orders.send(("error", traceback.format_exc()))


class Group:
    """Workers 0 .. size - 1; a plan runs on the first `world_size` of them."""

    def __init__(self, connections: list[Connection]):
        self._connections = connections

    def run(self, plan: RunPlan) -> RunResult:
        """Runs one configuration to its end. Raises DetError with the worker's traceback if a rank fails."""
        ranks = self._connections[: plan.world_size]
        port = free_port()
        for connection in ranks:
            connection.send((plan, port))
        answers, waiting = {}, list(ranks)
        while waiting:
            for connection in wait(waiting):
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = "error", "the process ended without an answer"
                if kind == "error":
                    raise DetError(f"rank {ranks.index(connection)} of {plan.name} failed:\n{value}")
                answers[connection] = value
                waiting.remove(connection)
        return answers[ranks[0]]


@contextmanager
def worker_group(size: int) -> Iterator[Group]:
    """`size` workers, ended when the block is left. Forked where that is sound, so that imports are paid once."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    workers, connections = [], []
    try:
        for rank in range(size):
            here, there = context.Pipe()
            worker = context.Process(target=_work, args=(rank, there), daemon=True)
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
