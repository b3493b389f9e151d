"""The float64 engine: how many moduli a product needs, and the float64 matrix products of its residues.

The products are `torch.mm` on OpenMP threads. A child that was forked after such a product has lost those threads and
would wait for them for ever, so there this engine is not chosen unless torch is set to one thread.
"""

import os
from functools import cache

import numpy as np
import torch

from ...arithmetic.residue import BLOCK_TERMS, MAXIMUM_MODULI, RECONSTRUCTED_BITS, moduli
from ...arithmetic.residue import capacity as _capacity
from .machine_code import Kernel
from .scan import Scan
from .threads import run_blocks
from .workspace import Cutter, padded

ENGINE = 1
"""FLOAT64 of `native.rebuild`."""

_residues_block = Kernel("residues", "residues_block")
_reduce_block = Kernel("residues", "reduce_block")

# Costs in nanoseconds on one core, measured on one processor. They decide the time, never a bit.
_COST_128 = 1.0
_COST_FLOAT64 = 0.08
_COST_RESIDUE = 2.0
_COST_REBUILD = 6.0
_COST_START = 300_000.0

_openmp_process: int | None = None
"""The process that last ran a product on several OpenMP threads."""


def note_openmp_threads() -> None:
    """Say that this process is about to run a product on OpenMP threads."""
    global _openmp_process
    if torch.get_num_threads() > 1:
        _openmp_process = os.getpid()


def lost_openmp_threads() -> bool:
    """Whether this is a forked child whose parent had OpenMP threads, which it would wait for for ever."""
    return _openmp_process not in (None, os.getpid()) and torch.get_num_threads() > 1


@cache
def products_are_exact() -> bool:
    """The engine's self-test, at its first product: a block of the largest residues against integer arithmetic."""
    largest = moduli(1)[0] // 2
    rng = np.random.default_rng(1)
    x, w = (largest - rng.integers(0, 2, (2, 9, BLOCK_TERMS))) * rng.choice([-1, 1], (2, 9, 1))
    return np.array_equal(torch.mm(torch.tensor(x).double(), torch.tensor(w).double().t()).numpy(), x @ w.T)


def capacity(count: int) -> int:
    """16 * log2 of the sums that `count` moduli rebuild; -1 for none."""
    return min(_capacity(count), 16 * RECONSTRUCTED_BITS) if count else -1


def moduli_count(x: Scan, w: Scan, terms: int, engine: str) -> int:
    """How many moduli are the quickest way to a product of these operands; 0 if none is.

    Pairs of bands beyond the capacity of the moduli go through a long accumulator.
    """
    pairs = x.bands * w.bands
    plain = _COST_128 * pairs * terms
    if engine == "long_accumulator" or plain == 0.0:
        return 0
    if engine == "auto" and (plain < _COST_START or lost_openmp_threads()):
        return 0
    if not products_are_exact():
        return 0
    # numpy, because torch may answer a search with OpenMP threads, which a forked child no longer has.
    x_norms, w_norms = x.norms.numpy(), np.sort(w.norms.numpy())
    best, best_cost = 0, float("inf") if engine == "float64" else plain
    for count in range(1, MAXIMUM_MODULI + 1):
        within = int(np.searchsorted(w_norms, capacity(count) - x_norms, side="right").sum())
        per_modulus = (
            _COST_FLOAT64 * pairs * terms + _COST_RESIDUE * (x.bands + w.bands) * terms + _COST_REBUILD * pairs
        )
        cost = _COST_START + count * per_modulus + _COST_128 * (pairs - within) * terms
        if cost < best_cost:
            best, best_cost = count, cost
        if within == pairs:
            break
    return best


def scratch_bytes(x: Scan, w: Scan, terms: int, count: int) -> int:
    """Memory of a product's residues and sums."""
    sizes = (x.bands * terms, w.bands * terms, count * x.bands * w.bands)
    return sum(padded(8 * size) for size in sizes)


def residue_products(x: Scan, w: Scan, terms: int, count: int, memory: Cutter) -> torch.Tensor:
    """float64 [count, bands of x, bands of w]: sums of products of residues, integers below 2^53.

    The folds are in the smaller operand. A block of BLOCK_TERMS terms and the reduced sum of the blocks before it stay
    exact in any order of summation.
    """
    note_openmp_threads()
    x_residues = memory.take(torch.float64, x.bands, terms)
    w_residues = memory.take(torch.float64, w.bands, terms)
    sums = memory.take(torch.float64, count, x.bands, w.bands)
    x_folded, w_folded = (count, 0) if x.bands <= w.bands else (0, count)
    for which in range(count):
        for scan, folded, out in ((x, x_folded, x_residues), (w, w_folded, w_residues)):
            run_blocks(
                _residues_block, scan.bands, 2 * scan.bands * terms,
                terms, *scan.operand, which, folded, out.data_ptr(),
            )  # fmt: skip
        target = sums[which]
        for k in range(0, terms, BLOCK_TERMS):
            left, right = x_residues[:, k : k + BLOCK_TERMS], w_residues[:, k : k + BLOCK_TERMS].t()
            if k == 0:
                torch.mm(left, right, out=target)
            else:
                run_blocks(_reduce_block, x.bands, 2 * x.bands * w.bands, target.data_ptr(), w.bands, which)
                target.addmm_(left, right)
    return sums
