"""Launches the scan of a product's two operands (`native.scan`)."""

from functools import lru_cache
from typing import NamedTuple

import torch

from .machine_code import Kernel
from .threads import run_blocks

_scan_rows = Kernel("scan", "scan_rows")
_scan_bands = Kernel("scan", "scan_bands")

BAND_BITS, LONG, PLACES = 54, 1 << 20, 2
"""BAND_BITS, LONG and SCAN_PLACES of `native.scan`, which a warm process does not import."""


class Scan(NamedTuple):
    """One operand as integers, at `at`: `bands` rows, of which first[i] .. first[i + 1] - 1 belong to its row i."""

    memory: torch.Tensor
    at: int
    offset: int
    bands: int
    first: torch.Tensor

    @property
    def first_at(self) -> int:
        return self.first.data_ptr()

    @property
    def norms(self) -> torch.Tensor:
        """int64 [bands]: 16 * log2 of a bound of each band's Euclidean norm."""
        return self.memory[self.offset + self.bands : self.offset + 2 * self.bands]


@lru_cache(maxsize=64)
def _counting(rows: int) -> torch.Tensor:
    return torch.arange(rows + 1, dtype=torch.int64)


def scan_operands(
    rows: int, columns: int, terms: int, x_at: int, x_stride: int, w_at: int, w_stride: int, engine: str
) -> tuple[Scan, Scan]:
    """The scans of x [rows, terms] and w [columns, terms]; for the long accumulator all rows are marked LONG."""
    each = PLACES + (0 if engine == "long_accumulator" else terms)
    memory = torch.empty((rows + columns) * each, dtype=torch.int64)
    at, w_offset = memory.data_ptr(), rows * each
    x = Scan(memory, at, 0, rows, _counting(rows))
    w = Scan(memory, at + 8 * w_offset, w_offset, columns, _counting(columns))
    if engine == "long_accumulator":
        memory.fill_(LONG)
        return x, w
    banded = run_blocks(
        _scan_rows, rows + columns, 6 * (rows + columns) * terms,
        terms, x_at, x_stride, rows, x.at, w_at, w_stride, columns, w.at,
    )  # fmt: skip
    if not banded:
        return x, w
    return _with_bands(x, terms, x_at, x_stride), _with_bands(w, terms, w_at, w_stride)


def _with_bands(scan: Scan, terms: int, at: int, stride: int) -> Scan:
    """The scan with a row for each band of the rows that need several."""
    rows = scan.bands
    widths = (scan.norms - LONG).clamp(min=1)
    first = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum((widths + (BAND_BITS - 1)) // BAND_BITS, 0, out=first[1:])
    bands = int(first[-1])
    if bands == rows:
        return scan
    memory = torch.empty(bands * (PLACES + terms), dtype=torch.int64)
    run_blocks(
        _scan_bands, rows, 6 * bands * terms,
        terms, at, stride, rows, scan.at, first.data_ptr(), bands, memory.data_ptr(),
    )  # fmt: skip
    return Scan(memory, memory.data_ptr(), 0, bands, first)
