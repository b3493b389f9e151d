"""Launches the scan of a product's two operands (`native.scan`), and the integers that it stands for."""

from functools import lru_cache
from typing import NamedTuple

import torch

from .machine_code import Kernel
from .threads import run_blocks

_scan_rows = Kernel("scan", "scan_rows")
_integers_block = Kernel("bands", "integers_block")

BAND_BITS, LONG, PLACES = 54, 1 << 20, 2
"""BAND_BITS, LONG and SCAN_PLACES of `native.bands`, which a warm process does not import."""


class Scan(NamedTuple):
    """One operand [rows, K] as integers: bands first[i] .. first[i + 1] - 1 belong to its row i.

    `places` is int64 [PLACES, bands]: the exponents of the bands, and 16 * log2 of a bound of their Euclidean norms;
    `row_of` int64 [bands]: whose band it is.
    """

    operand_at: int
    stride: int
    places: torch.Tensor
    first: torch.Tensor
    row_of: torch.Tensor

    @property
    def at(self) -> int:
        return self.places.data_ptr()

    @property
    def first_at(self) -> int:
        return self.first.data_ptr()

    @property
    def bands(self) -> int:
        return self.places.shape[1]

    @property
    def norms(self) -> torch.Tensor:
        return self.places[1]

    @property
    def operand(self) -> tuple[int, ...]:
        """What kernels that read the operand through a scan take: address, stride, `row_of`, scan, bands."""
        return self.operand_at, self.stride, self.row_of.data_ptr(), self.at, self.bands


@lru_cache(maxsize=64)
def _counting(rows: int) -> torch.Tensor:
    return torch.arange(rows + 1, dtype=torch.int64)


def scan_operands(
    rows: int, columns: int, terms: int, x_at: int, x_stride: int, w_at: int, w_stride: int, engine: str
) -> tuple[Scan, Scan]:
    """The scans of x [rows, terms] and w [columns, terms]; for the long accumulator all rows are marked LONG."""
    x, w = (
        Scan(at, stride, torch.empty((PLACES, size), dtype=torch.int64), _counting(size), _counting(size)[:-1])
        for at, stride, size in ((x_at, x_stride, rows), (w_at, w_stride, columns))
    )
    if engine == "long_accumulator":
        x.places.fill_(LONG)
        w.places.fill_(LONG)
        return x, w
    banded = run_blocks(
        _scan_rows, rows + columns, (rows + columns) * terms // 4,
        terms, x_at, x_stride, rows, x.at, w_at, w_stride, columns, w.at,
    )  # fmt: skip
    return (_with_bands(x, terms), _with_bands(w, terms)) if banded else (x, w)


def _with_bands(scan: Scan, terms: int) -> Scan:
    """The scan with a place for each band of the rows that need several."""
    widths = (scan.norms - LONG).clamp(min=1)
    bands_of_row = (widths + (BAND_BITS - 1)) // BAND_BITS
    first = torch.zeros(len(scan.first), dtype=torch.int64)
    torch.cumsum(bands_of_row, 0, out=first[1:])
    if int(first[-1]) == scan.bands:
        return scan
    row_of = scan.row_of.repeat_interleave(bands_of_row)
    exponents, norms = scan.places[:, row_of]
    number = torch.arange(len(row_of)) - first[row_of]
    # An element of a band is below 2^BAND_BITS, of the last one below 2^(what is left).
    bits = (norms - LONG - BAND_BITS * number).clamp(max=BAND_BITS)
    bound = 16 * bits + 8 * max(terms - 1, 0).bit_length()
    places = torch.stack([exponents + BAND_BITS * number, torch.where(norms > LONG, bound, norms)])
    return scan._replace(places=places, first=first, row_of=row_of)


def fill_integers(scan: Scan, terms: int, out: torch.Tensor) -> None:
    """Write the integers of the bands into `out`, int64 [bands, terms]; rows of norm LONG stay as they are."""
    run_blocks(_integers_block, scan.bands, 4 * scan.bands * terms, terms, *scan.operand, out.data_ptr())
