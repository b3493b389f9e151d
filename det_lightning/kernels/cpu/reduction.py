"""Launches the exact sums of `native.reduction` and the kernels on whole arrays of states."""

import torch

from ...arithmetic.formats import NB, Format
from .binned_sum import sum_rows
from .machine_code import Kernel
from .threads import run_blocks
from .views import empty_words, float32_words, from_words

_sum_block = Kernel("reduction", "sum_block")
_normalise_states = Kernel("digits", "normalise_states")
_finalize_states = Kernel("digits", "finalize_states")


def sum_states(x: torch.Tensor) -> torch.Tensor:
    """Canonical states [outer, inner, NB] of the sums over the middle axis of `x` [outer, n, inner]."""
    outer, n, inner = x.shape
    if inner == 1:
        return sum_rows("sum", x.view(outer, n)).view(outer, 1, NB)
    x = float32_words(x)
    states = torch.zeros((outer, inner, NB), dtype=torch.int64)
    run_blocks(_sum_block, outer * inner, 4 * x.numel(), x.data_ptr(), states.data_ptr(), inner, n * inner, n)
    return states


def sum_of_squares_state(x: torch.Tensor) -> torch.Tensor:
    """The canonical state [NB] of the sum of squares of all elements."""
    return sum_rows("squares", x.reshape(1, x.numel())).view(NB)


def normalise(states: torch.Tensor) -> torch.Tensor:
    """Make a contiguous tensor of states canonical in place, and return it."""
    count = states.numel() // NB
    run_blocks(_normalise_states, count, 40 * count, states.data_ptr())
    return states


def finalize(states: torch.Tensor, form: Format, denominator: int) -> torch.Tensor:
    """The rounded values of a contiguous tensor of states [..., NB]. Requires: 0 <= denominator < 2^31."""
    out = empty_words(states.shape[:-1], form)
    run_blocks(
        _finalize_states, out.numel(), 80 * out.numel(),
        states.data_ptr(), out.data_ptr(), denominator, form.significand_bits, form.exponent_bits,
    )  # fmt: skip
    return from_words(out, form)
