"""A small thread pool over blocks of rows.

Kernels release the interpreter lock and write disjoint blocks, so the number of threads cannot change a result. The
pool is our own because Numba's layers do not survive a fork (`omp`) or two callers at once (`workqueue`).
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from .machine_code import Kernel, pack

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
            # The threads of a pool end by themselves once it is garbage.
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="det_lightning")
        return _pool


def run_blocks(kernel: Kernel, rows: int, steps: int, *arguments: int, blocks_a_thread: int = 4) -> int:
    """Call `kernel(start, stop, *arguments)` over blocks that cover `range(rows)`, and wait for all of them.

    `steps` estimates the work of the whole; little work stays in the calling thread. There are as many threads as
    `torch.get_num_threads()` says, the calling one included. Returns the largest number that a block returned.
    """
    if rows <= 0:
        return 0
    entry, packed = kernel.entry(), pack(*arguments)
    threads = min(torch.get_num_threads(), rows) if steps > SMALL_WORK else 1
    if threads == 1:
        return entry(0, rows, packed)
    # Several blocks a thread even out rows of unequal cost.
    blocks = min(rows, blocks_a_thread * threads)
    pending = [(rows * i // blocks, rows * (i + 1) // blocks) for i in range(blocks)]

    def work() -> int:
        largest = 0
        while True:
            try:
                start, stop = pending.pop()
            except IndexError:
                return largest
            largest = max(largest, entry(start, stop, packed))

    helpers = [_executor(threads - 1).submit(work) for _ in range(threads - 1)]
    largest = work()
    # A helper that never started has nothing left to do.
    return max(largest, *(0 if helper.cancel() else helper.result() for helper in helpers))
