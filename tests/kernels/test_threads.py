"""The thread pool: every row once, also after a fork and with several callers."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from det_lightning.kernels.cpu import threads

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Stands in for a kernel and remembers the blocks and the threads that it was called with."""

    def __init__(self):
        self.blocks, self.threads, self.lock = [], set(), threading.Lock()

    def entry(self):
        return self.call

    def call(self, start, stop, packed):
        with self.lock:
            self.blocks.append((start, stop, packed))
            self.threads.add(threading.get_ident())
        return stop


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1001])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_blocks_cover_every_row_once(rows, count, thread_count):
    thread_count(count)
    kernel = Recorder()
    assert threads.run_blocks(kernel, rows, 10**9, 3, -4) == rows
    covered = [row for start, stop, _ in kernel.blocks for row in range(start, stop)]
    assert sorted(covered) == list(range(rows))
    assert {packed for _, _, packed in kernel.blocks} == {threads.pack(3, -4)}
    assert len(kernel.threads) <= count


def test_little_work_stays_in_the_calling_thread(thread_count):
    thread_count(4)
    kernel = Recorder()
    threads.run_blocks(kernel, 100, 1000)
    assert kernel.threads == {threading.get_ident()}
    assert kernel.blocks == [(0, 100, b"")]


def test_no_rows_are_no_call():
    kernel = Recorder()
    assert threads.run_blocks(kernel, 0, 10**9) == 0
    assert kernel.blocks == []


def test_an_error_in_another_thread_is_raised_in_the_caller(thread_count):
    thread_count(2)

    class Failing(Recorder):
        def call(self, start, stop, packed):
            super().call(start, stop, packed)
            raise RuntimeError("block failed")

    with pytest.raises(RuntimeError, match="block failed"):
        threads.run_blocks(Failing(), 100, 10**9)


FORK = """
import os, sys, torch
from det_lightning.ops.gemm import det_gemm
from det_lightning.kernels.cpu import threads
torch.set_num_threads(2)
x, w = torch.randn(100, 900), torch.randn(90, 900)

def products(engines):
    return [det_gemm(x, w, engine=engine).numpy().tobytes() for engine in engines]

before = products(["auto", "long_accumulator", "float64"])
assert threads._pool is not None
child = os.fork()
if child == 0:
    assert threads._pool is None
    same = products(["auto", "long_accumulator"]) == before[:2]
    torch.set_num_threads(1)
    os._exit(0 if same and products(["float64"]) == before[2:] else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_computes_the_same_bits_on_a_new_pool():
    # The parent has used OpenMP threads by then (float64 engine), which the child cannot: it must not wait for them.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORK], env=environment, check=True, timeout=600)
