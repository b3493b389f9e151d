"""Launches the sums over equal indices of `native.scatter`."""

import torch

from ...arithmetic.formats import Format
from .machine_code import Kernel
from .threads import run_blocks
from .views import empty_words, float32_words, from_words

_group_block = Kernel("scatter", "group_block")
_add_groups_block = Kernel("scatter", "add_groups_block")
_round_groups_block = Kernel("scatter", "round_groups_block")

_PART_COLUMNS = 64
"""Columns of a group that one block takes, so that few large groups still occupy every thread."""


def _group(index: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.zeros(groups + 2, dtype=torch.int64)
    order = torch.empty(index.numel(), dtype=torch.int64)
    _group_block(0, index.numel(), index.data_ptr(), groups, offsets.data_ptr(), order.data_ptr())
    return offsets, order


def _blocks(groups: int, columns: int) -> tuple[int, int]:
    parts = -(-columns // _PART_COLUMNS)
    return groups * parts, parts


def add_index_digits(digits: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """digits [groups, columns, NB] += the rows of source [n, columns] by index [n], on checked contiguous arguments."""
    source = float32_words(source)
    (sources, columns), groups = source.shape, digits.shape[0]
    offsets, order = _group(index, groups)
    blocks, parts = _blocks(groups, columns)
    run_blocks(
        _add_groups_block, blocks, 8 * source.numel(),
        source.data_ptr(), sources, columns, parts, _PART_COLUMNS, offsets.data_ptr(), order.data_ptr(),
        digits.data_ptr(),
    )  # fmt: skip


def index_sum(
    more: torch.Tensor | None, index: torch.Tensor, source: torch.Tensor, groups: int, form: Format
) -> torch.Tensor:
    """The rounded sums [groups, columns] of `more` and the rows of source by index, on checked arguments."""
    source = float32_words(source)
    more = None if more is None else float32_words(more)
    sources, columns = source.shape
    out = empty_words((groups, columns), form)
    offsets, order = _group(index, groups)
    blocks, parts = _blocks(groups, columns)
    run_blocks(
        _round_groups_block, blocks, 8 * source.numel() + out.numel(),
        source.data_ptr(), sources, columns, parts, _PART_COLUMNS, offsets.data_ptr(), order.data_ptr(),
        0 if more is None else more.data_ptr(), out.data_ptr(), form.significand_bits, form.exponent_bits,
    )  # fmt: skip
    return from_words(out, form)
