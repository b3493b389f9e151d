"""Launches the exact sums of rows of `native.binned_sum`."""

import torch

from ...arithmetic.formats import NB
from .machine_code import Kernel
from .threads import run_blocks
from .views import float32_words

_sum_parts_block = Kernel("binned_sum", "sum_parts_block")
_normalise_states = Kernel("digits", "normalise_states")

KINDS = {"sum": 0, "squares": 1, "products": 2}
"""The numbers of the kinds in `native.binned_sum`."""

_PART = 1 << 15
"""Terms that one block of a long row takes."""


def sum_rows(kind: str, x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    """Canonical states [rows, NB] of the sums of x[i, k], x[i, k]^2 or x[i, k] * w[i, k] over k; x, w: [rows, n]."""
    x = float32_words(x)
    w = x if w is None else float32_words(w)
    rows, n = x.shape
    parts = max(1, -(-n // _PART))
    states = torch.empty((rows, parts, NB), dtype=torch.int64)
    run_blocks(
        _sum_parts_block, rows * parts, 2 * x.numel(),
        KINDS[kind], x.data_ptr(), w.data_ptr(), n, parts, _PART, states.data_ptr(),
    )  # fmt: skip
    if parts == 1:
        return states.view(rows, NB)
    total = states.sum(dim=1)
    run_blocks(_normalise_states, rows, 40 * rows, total.data_ptr())
    return total
