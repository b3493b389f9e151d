"""Launches the sums over equal indices of `cuda_src/scatter.cu`. The twin of `cpu.scatter`."""

from typing import NamedTuple

import torch

from ..arithmetic.formats import NB, Format
from .cuda import DTYPES, FORMAT_CODES, launch, plain
from .cuda_reduction import normalise

_THREADS = 128
_LARGE = 512
"""Groups of more rows than this are summed by several blocks."""

_CHUNKS = 64


class _Groups(NamedTuple):
    """Rows by group, and the canonical states [large groups, columns, NB] of groups of many rows."""

    order: torch.Tensor
    offsets: torch.Tensor
    place_of_group: torch.Tensor
    large_states: torch.Tensor


def _grouped(index: torch.Tensor, source: torch.Tensor, groups: int) -> _Groups:
    device, columns = index.device, source.shape[1]
    counts = torch.bincount(index, minlength=groups)
    offsets = torch.zeros(groups + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=offsets[1:])
    order = torch.argsort(index)
    large = (counts > _LARGE).nonzero().view(-1)
    places = torch.full((groups,), -1, dtype=torch.int64, device=device)
    places[large] = torch.arange(large.numel(), device=device)
    states = torch.zeros((large.numel(), columns, NB), dtype=torch.int64, device=device)
    if states.numel():
        launch(
            device, "scatter", "scatter_large", (large.numel() * -(-columns // _THREADS), _CHUNKS), _THREADS,
            source.data_ptr(), FORMAT_CODES[source.dtype], columns, order.data_ptr(), offsets.data_ptr(), large.data_ptr(),
            states.data_ptr(),
        )  # fmt: skip
        normalise(states)
    return _Groups(order, offsets, places, states)


def add_index_digits(digits: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    """digits [groups, columns, NB] += the rows of source [n, columns] by index [n], on checked contiguous arguments."""
    source = plain(source).contiguous()
    columns, items = source.shape[1], digits.shape[0] * source.shape[1]
    if not items or not index.numel():
        return
    found = _grouped(index, source, digits.shape[0])
    launch(
        digits.device, "scatter", "scatter_add", (-(-items // _THREADS),), _THREADS,
        source.data_ptr(), FORMAT_CODES[source.dtype], columns, found.order.data_ptr(), found.offsets.data_ptr(),
        found.place_of_group.data_ptr(), found.large_states.data_ptr(), digits.data_ptr(), items,
    )  # fmt: skip


def index_sum(
    more: torch.Tensor | None, index: torch.Tensor, source: torch.Tensor, groups: int, form: Format
) -> torch.Tensor:
    """The rounded sums [groups, columns] of `more` and the rows of source by index, on checked arguments."""
    source = plain(source).contiguous()
    more = None if more is None else plain(more).contiguous()
    columns = source.shape[1]
    out = torch.empty((groups, columns), dtype=DTYPES[form], device=source.device)
    if not out.numel():
        return out
    found = _grouped(index, source, groups)
    launch(
        out.device, "scatter", "scatter_round", (-(-out.numel() // _THREADS),), _THREADS,
        source.data_ptr(), FORMAT_CODES[source.dtype], columns, found.order.data_ptr(), found.offsets.data_ptr(),
        found.place_of_group.data_ptr(), found.large_states.data_ptr(),
        0 if more is None else more.data_ptr(), 0 if more is None else FORMAT_CODES[more.dtype],
        out.data_ptr(), FORMAT_CODES[out.dtype], out.numel(),
    )  # fmt: skip
    return out
