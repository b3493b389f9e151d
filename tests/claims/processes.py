"""Fresh processes that cost little: a server imports Lightning once and forks from there.

A test process has used threads and could not be forked safely; the server has not. Every call gets new processes, so
that a failed run leaves nothing behind.
"""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch

from det_lightning.strategies.given_ranks import free_port

PATIENCE_SECONDS = 600
_raised: BaseException | None = None
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["tests.claims.trainings", "det_lightning.demo.runs"]
    + [f"det_lightning.kernels.cpu.{name}" for name in ("gemm", "reduction", "elementary", "digest")]
)


class Failed(Exception):
    """A process raised; `kind` is the class of what it raised, the text ends with its message."""

    def __init__(self, kind: str, message: str, trace: str):
        super().__init__(f"{trace}\n{kind}: {message}")
        self.kind, self.message = kind, message


def _serve(answers, threads: int, function: Callable, arguments: tuple, options: dict) -> None:
    global _raised
    torch.set_num_threads(threads)
    try:
        answer = ("result", function(*arguments, **options))
    except BaseException as error:
        answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        # Its frames may hold stock ddp's wrapper, and that the process group, which may wait for ever if Python frees it.
        _raised = error
    answers.send_bytes(pickle.dumps(answer))  # by value: tensors in shared memory would end with this process


class Background:
    """A function that runs in a process of its own; `pid` is there to be killed."""

    def __init__(self, function: Callable, *arguments: Any, threads: int = 1, **options: Any):
        here, there = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(there, threads, function, arguments, options))
        self._process.start()
        there.close()
        self.answers, self.pid = here, self._process.pid

    def result(self) -> Any:
        if not self.answers.poll(PATIENCE_SECONDS):
            self.end()
            raise Failed("Timeout", f"no answer in {PATIENCE_SECONDS} s", "")
        kind, value = pickle.loads(self.answers.recv_bytes())
        self._process.join(timeout=60)
        self.end()
        if kind == "error":
            raise Failed(*value)
        return value

    def end(self) -> int | None:
        """Kills the process if it still runs, and returns its exit code."""
        self._process.kill()
        self._process.join(timeout=PATIENCE_SECONDS)
        return self._process.exitcode


def in_new_process(function: Callable, *arguments: Any, threads: int = 1, **options: Any) -> Any:
    """function(*arguments, **options) in a new process; it may start processes of its own."""
    return Background(function, *arguments, threads=threads, **options).result()


def on_ranks(world_size: int, function: Callable, *arguments: Any, threads: int = 1, **options: Any) -> list[Any]:
    """function(rank, world_size, port, *arguments, **options) on every rank; what each returned, in order of ranks.

    Raises:
        Failed: the first failure; the other ranks are ended.
    """
    port = free_port()
    ranks = [
        Background(function, rank, world_size, port, *arguments, threads=threads, **options)
        for rank in range(world_size)
    ]
    try:
        waiting, results = {rank.answers: place for place, rank in enumerate(ranks)}, [None] * world_size
        while waiting:
            ready = wait(list(waiting), timeout=PATIENCE_SECONDS)
            if not ready:
                raise Failed("Timeout", f"ranks {sorted(waiting.values())} gave no answer", "")
            for answers in ready:
                place = waiting.pop(answers)
                results[place] = ranks[place].result()
        return results
    finally:
        for rank in ranks:
            rank.end()
