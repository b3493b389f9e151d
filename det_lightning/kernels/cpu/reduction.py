"""Launches the exact sums of `native.reduction` and the kernels on whole arrays of states."""

import torch

from ...arithmetic.formats import NB, Format
from .machine_code import Kernel
from .threads import run_blocks
from .views import empty_words, float32_words, from_words

_sum_block = Kernel("reduction", "sum_block")
_sum_of_squares_block = Kernel("reduction", "sum_of_squares_block")
_normalise_states = Kernel("digits", "normalise_states")
_finalize_states = Kernel("digits", "finalize_states")

_PART = 1 << 14
"""Elements that one block of a long sum takes."""


def sum_states(x: torch.Tensor) -> torch.Tensor:
    """Canonical states [outer, inner, NB] of the sums over the middle axis of `x` [outer, n, inner]."""
    outer, n, inner = x.shape
    x = float32_words(x)
    sums, parts = outer * inner, n // _PART if inner == 1 else 0
    states = torch.zeros((sums, NB), dtype=torch.int64)
    if sums >= 64 or parts <= 1:
        run_blocks(_sum_block, sums, 4 * x.numel(), x.data_ptr(), states.data_ptr(), inner, n * inner, n)
        return states.view(outer, inner, NB)
    # Few long rows: cut each into equal parts and a rest, so that every thread has work.
    for row in range(outer):
        partial = torch.zeros((parts + 1, NB), dtype=torch.int64)
        first, rest = x.data_ptr() + 4 * row * n, n - parts * _PART
        run_blocks(_sum_block, parts, 4 * n, first, partial.data_ptr(), 1, _PART, _PART)
        _sum_block(0, 1, first + 4 * parts * _PART, partial.data_ptr() + 8 * NB * parts, 1, rest, rest)
        states[row] = partial.sum(dim=0)
    return normalise(states).view(outer, 1, NB)


def sum_of_squares_state(x: torch.Tensor) -> torch.Tensor:
    """The canonical state [NB] of the sum of squares of all elements."""
    x = float32_words(x)
    total = x.numel()
    states = torch.zeros((-(-total // _PART), NB), dtype=torch.int64)
    run_blocks(_sum_of_squares_block, states.shape[0], 6 * total, x.data_ptr(), states.data_ptr(), _PART, total)
    return states[0] if states.shape[0] == 1 else normalise(states.sum(dim=0))


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
