"""A small thread pool over blocks of rows.

Kernels release the interpreter lock and write disjoint blocks, so the number of threads cannot change a result. The
pool is our own because Numba's layers do not survive a fork (`omp`) or two callers at once (`workqueue`).
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()

SMALL_WORK = 200_000
"""Below this many elementary steps (about 0.1 ms) handing work to another thread costs more than it saves."""


def _forget_pool() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _executor(threads: int) -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None or _pool._max_workers < threads:
            # The old pool's threads end by themselves once it is garbage.
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="det_lightning")
        return _pool


def run_blocks(kernel: Callable, rows: int, steps: int, *arguments: object) -> None:
    """Call `kernel(start, stop, *arguments)` over blocks that cover `range(rows)`, and wait for all of them.

    `steps` estimates the work of the whole; little work stays in the calling thread. There are as many threads as
    `torch.get_num_threads()` says, the calling one included. An exception in a block is raised here.
    """
    if rows <= 0:
        return
    threads = min(torch.get_num_threads(), rows) if steps > SMALL_WORK else 1
    if threads == 1:
        kernel(0, rows, *arguments)
        return
    # Four blocks a thread even out rows of unequal cost.
    blocks = min(rows, 4 * threads)
    bounds = [rows * i // blocks for i in range(blocks + 1)]
    pending = list(zip(bounds[:-1], bounds[1:], strict=True))

    def work() -> None:
        while True:
            try:
                start, stop = pending.pop()
            except IndexError:
                return
            kernel(start, stop, *arguments)

    helpers = [_executor(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
