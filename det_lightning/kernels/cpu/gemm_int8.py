"""The int8 engine: how many moduli a product needs, and the int8 matrix products of its residues by `torch._int_mm`.

On processors with int8 dot products (VNNI, AMX) it is the quickest. On others libraries may use instructions that
saturate: a self-test at the first product finds that out, and then the engine is refused.
"""

from functools import cache

import numpy as np
import torch
from llvmlite import binding

from ...arithmetic.residue_int8 import MAXIMUM_MODULI, MAXIMUM_TERMS, capacity
from .machine_code import Kernel
from .scan import Scan
from .threads import run_blocks

_residues_block = Kernel("residues_int8", "int8_residues_block")
_rebuild_block = Kernel("residues_int8", "int8_rebuild_block")

_FAST_FEATURES = ("avx512vnni", "avxvnni", "amx-int8")
_START_TERMS = 1 << 19
"""Products of fewer terms than this are not worth starting 10 to 17 matrix products."""


@cache
def products_are_exact() -> bool:
    """The engine's self-test, at its first product: the largest residues of every sign against integer arithmetic."""
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


@cache
def is_fast() -> bool:
    """Whether the processor has int8 dot products and the library's are exact."""
    features = binding.get_host_cpu_features()
    return any(features.get(name) for name in _FAST_FEATURES) and products_are_exact()


def moduli_count(x: Scan, w: Scan, terms: int) -> int:
    """The moduli that rebuild every pair of bands, or the most there are; 0 for an empty sum.

    Pairs beyond their capacity go through 128 bits or a long accumulator.
    """
    if terms == 0 or terms > MAXIMUM_TERMS:
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


def scratch_bytes(x: Scan, w: Scan, terms: int, count: int) -> int:
    """Memory of a product's scans, residues, sums and rebuilt integers."""
    return (8 + count) * (x.bands + w.bands) * terms + (4 * count + 16) * x.bands * w.bands


def integer_products(x: Scan, w: Scan, terms: int, count: int) -> torch.Tensor:
    """int64 [bands of x, bands of w, 2]: the sums of products of integers, 128 bits each, the high half first.

    They are right where the norms add up to at most `capacity(count)`.
    """
    residues = []
    for scan, folded in ((x, x.bands <= w.bands), (w, x.bands > w.bands)):
        out = torch.empty((count, scan.bands, terms), dtype=torch.int8)
        run_blocks(
            _residues_block, scan.bands, count * scan.bands * terms,
            scan.at, scan.bands, terms, count, int(folded), out.data_ptr(),
        )  # fmt: skip
        residues.append(out)
    sums = torch.empty((count, x.bands, w.bands), dtype=torch.int32)
    for left, right, target in zip(*residues, sums, strict=True):
        torch._int_mm(left, right.t(), out=target)
    out = torch.empty((x.bands, w.bands, 2), dtype=torch.int64)
    elements = x.bands * w.bands
    run_blocks(
        _rebuild_block, elements, 4 * count * elements, sums.data_ptr(), elements, count, out.data_ptr()
    )  # fmt: skip
    return out
