"""Exact sums along one axis, and sums of squares."""

import numpy as np
import torch

from ...arithmetic.formats import NB, Format
from .cache import device_function, kernel
from .digits import (
    add_integer,
    carry_state,
    count_special,
    count_special_product,
    exponent_of,
    finalize_states,
    is_special,
    normalise_states,
    significand_of,
)
from .threads import run_blocks
from .views import float32_bits, from_bits

CARRY_TERMS = 1 << 14
"""Terms between two carries (see `add_integer`)."""


@device_function
def add_term(state, b):
    """state += the value of one float32 pattern."""
    if is_special(b):
        count_special(state, b)
    else:
        add_integer(state, significand_of(b), exponent_of(b))


@kernel
def sum_block(start, stop, bits, states):
    """states[i] += the sum over k of bits[outer, k, inner], i = outer * inner size + inner, kept canonical."""
    inner = bits.shape[2]
    for i in range(start, stop):
        outer, column = i // inner, i % inner
        for k in range(bits.shape[1]):
            add_term(states[i], np.int64(bits[outer, k, column]))
            if k % CARRY_TERMS == CARRY_TERMS - 1:
                carry_state(states[i])
        carry_state(states[i])


@kernel
def sum_of_squares_block(start, stop, bits, states):
    """states[i] += the sum over k of bits[i, k]^2, canonical."""
    for i in range(start, stop):
        for k in range(bits.shape[1]):
            b = np.int64(bits[i, k])
            if is_special(b):
                count_special_product(states[i], b, b)
            else:
                value = significand_of(b)
                add_integer(states[i], value * value, 2 * exponent_of(b))
            if k % CARRY_TERMS == CARRY_TERMS - 1:
                carry_state(states[i])
        carry_state(states[i])


def sum_states(x: torch.Tensor) -> torch.Tensor:
    """Canonical states [outer, inner, NB] of the sums over the middle axis of `x` [outer, n, inner]."""
    outer, n, inner = x.shape
    bits = float32_bits(x)
    states = torch.zeros((outer * inner, NB), dtype=torch.int64)
    parts = _parts(outer * inner, n)
    if inner != 1 or parts == 1:
        run_blocks(sum_block, outer * inner, 4 * x.numel(), bits, states.numpy())
        return states.view(outer, inner, NB)
    # Few long rows: cut each into equal parts and a rest, so that every thread has work.
    length = n // parts
    partial = torch.zeros((outer * parts, NB), dtype=torch.int64)
    cut = np.ascontiguousarray(bits[:, : parts * length]).reshape(outer * parts, length, 1)
    run_blocks(sum_block, outer * parts, 4 * x.numel(), cut, partial.numpy())
    sum_block(0, outer, np.ascontiguousarray(bits[:, parts * length :]), states.numpy())
    states += partial.view(outer, parts, NB).sum(dim=1)
    return normalise(states).view(outer, 1, NB)


def _parts(rows: int, n: int) -> int:
    return 1 if rows >= 64 or n < 1 << 14 else min(64, n >> 12)


def sum_of_squares_state(x: torch.Tensor) -> torch.Tensor:
    """The canonical state [NB] of the sum of squares of all elements."""
    bits = float32_bits(x).reshape(-1)
    parts = _parts(1, bits.size)
    length = bits.size // parts
    states = torch.zeros((parts + 1, NB), dtype=torch.int64)
    view = states.numpy()
    run_blocks(sum_of_squares_block, parts, 4 * bits.size, bits[: parts * length].reshape(parts, length), view)
    sum_of_squares_block(0, 1, bits[parts * length :].reshape(1, -1), view[parts:])
    return normalise(states.sum(dim=0))


def normalise(states: torch.Tensor) -> torch.Tensor:
    """Make a contiguous tensor of states canonical in place, and return it."""
    flat = states.view(-1, NB)
    run_blocks(normalise_states, flat.shape[0], 40 * flat.shape[0], flat.numpy())
    return states


def finalize(states: torch.Tensor, form: Format, denominator: int) -> torch.Tensor:
    """The rounded values of a contiguous tensor of states [..., NB]. Requires: 0 <= denominator < 2^31."""
    flat = states.view(-1, NB)
    out = torch.empty(flat.shape[0], dtype=torch.int32)
    run_blocks(
        finalize_states, flat.shape[0], 80 * flat.shape[0], flat.numpy(), out.numpy(), denominator,
        form.significand_bits, form.exponent_bits,
    )
    return from_bits(out, form).view(states.shape[:-1])
