"""Exact sums of rows on the device. The twin of `cpu.binned_sum`."""

import torch

from .cuda_reduction import row_states


def sum_rows(kind: str, x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    """Canonical states [rows, NB] of the sums of x[i, k], x[i, k]^2 or x[i, k] * w[i, k] over k; x, w: [rows, n]."""
    return row_states(kind, x, w)
