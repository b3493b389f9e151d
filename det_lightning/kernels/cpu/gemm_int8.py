"""The int8 engine: how many moduli a product needs, and the int8 matrix products of its residues.

On processors with int8 dot products it is the quickest: with AMX tiles by `amx`, otherwise by `torch._int_mm` (VNNI). On
others libraries may use instructions that saturate: a self-test at the first product finds that out, and then the
engine is refused.
"""

from functools import cache

import numpy as np
import torch
from llvmlite import binding

from ...arithmetic.residue_int8 import MAXIMUM_MODULI, MAXIMUM_TERMS, capacity
from . import amx
from .gemm_float64 import lost_openmp_threads, note_openmp_threads
from .machine_code import Kernel
from .scan import Scan
from .threads import run_blocks
from .workspace import Cutter, padded

_residues_block = Kernel("residues_int8", "int8_residues_block")
_operands_block = Kernel("residues_int8", "int8_operands_block")

ENGINE = 0
"""INT8 of `native.rebuild`."""

_FAST_FEATURES = ("avx512vnni", "avxvnni", "amx-int8")
_START_TERMS = 1 << 19
"""Products of fewer terms than this are not worth starting 10 to 17 matrix products."""


@cache
def library_is_exact() -> bool:
    """The self-test of `torch._int_mm`: the largest residues of every sign against integer arithmetic."""
    rng = np.random.default_rng(1)
    for rows, terms, columns in ((5, 33, 7), (64, 512, 64), (65, 1030, 33)):
        x = rng.choice([-128, 127, 126], (rows, terms)).astype(np.int8)
        w = rng.choice([-128, 127, 125], (columns, terms)).astype(np.int8)
        # Rows of one sign add up to the largest sums, pairs of neighbours included.
        x[0], w[0], x[1], w[1] = -128, -128, 127, 127
        try:
            product = torch._int_mm(torch.from_numpy(x), torch.from_numpy(w).t()).numpy()
        except (AttributeError, RuntimeError):
            return False
        if not np.array_equal(product, x.astype(np.int32) @ w.astype(np.int32).T):
            return False
    return True


def products_are_exact() -> bool:
    """Whether there are int8 products that passed their self-test, at the engine's first product."""
    return amx.is_available() or library_is_exact()


@cache
def is_fast() -> bool:
    """Whether the processor has int8 dot products and those that the engine takes are exact."""
    features = binding.get_host_cpu_features()
    return any(features.get(name) for name in _FAST_FEATURES) and products_are_exact()


def is_usable() -> bool:
    """Whether the products need no OpenMP threads, or this process has those of the library."""
    return amx.is_available() or not lost_openmp_threads()


def moduli_count(x: Scan, w: Scan, terms: int, engine: str) -> int:
    """The moduli that rebuild every pair of bands, or the most there are; 0 for sums of no or one term.

    Pairs beyond their capacity go through a long accumulator.
    """
    # A column has the strides of its transpose, which `torch._int_mm` then multiplies wrongly.
    if terms < 2 or terms > MAXIMUM_TERMS:
        return 0
    limit = 16 * 126
    x_norms, w_norms = x.norms.numpy(), w.norms.numpy()
    x_norms, w_norms = x_norms[x_norms <= limit], w_norms[w_norms <= limit]
    if x_norms.size == 0 or w_norms.size == 0:
        return 0
    needed = int(x_norms.max()) + int(w_norms.max())
    return next((n for n in range(1, MAXIMUM_MODULI) if capacity(n) >= needed), MAXIMUM_MODULI)


def is_worth_starting(x: Scan, w: Scan, terms: int) -> bool:
    return x.bands * w.bands * terms >= _START_TERMS


def _sizes(x: Scan, w: Scan, terms: int) -> tuple[int, int, int]:
    """Rows, columns and terms of the matrices of residues."""
    return amx.padded_sizes(x.bands, w.bands, terms) if amx.is_available() else (x.bands, w.bands, terms)


def scratch_bytes(x: Scan, w: Scan, terms: int, count: int) -> int:
    """Memory of a product's residues and sums."""
    rows, columns, depth = _sizes(x, w, terms)
    return sum(padded(count * size) for size in (rows * depth, columns * depth, 4 * rows * columns))


def residue_products(x: Scan, w: Scan, terms: int, count: int, memory: Cutter) -> torch.Tensor:
    """int32 [count, at least the bands of x, at least the bands of w]: sums of products of residues.

    The folds are in the smaller operand.
    """
    rows, columns, depth = _sizes(x, w, terms)
    left, right = memory.take(torch.int8, count, rows, depth), memory.take(torch.int8, count, columns, depth)
    sums = memory.take(torch.int32, count, rows, columns)
    x_folded, w_folded = (count, 0) if x.bands <= w.bands else (0, count)
    if amx.is_available():
        panels = -(-x.bands // amx.PANEL) + -(-w.bands // amx.PANEL)
        run_blocks(
            _operands_block, panels, count * (x.bands + w.bands) * terms // 4,
            terms, *x.operand, x_folded, *w.operand, w_folded, count, left.data_ptr(), right.data_ptr(), depth,
            left.stride(0), right.stride(0),
        )  # fmt: skip
        amx.products(left, right, sums)
        return sums
    for scan, folded, out in ((x, x_folded, left), (w, w_folded, right)):
        run_blocks(
            _residues_block, scan.bands, count * scan.bands * terms // 4,
            terms, *scan.operand, folded, count, out.data_ptr(), depth, out.stride(0),
        )  # fmt: skip
    note_openmp_threads()
    for x_residues, w_residues, target in zip(left, right, sums, strict=True):
        torch._int_mm(x_residues, w_residues.t(), out=target)
    return sums
