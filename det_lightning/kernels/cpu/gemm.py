"""Launches the exact products: cuts them into tiles of bounded memory and chooses an engine for each.

The choice changes the time only: every way through `native.gemm` ends in the integer that
`arithmetic.long_accumulator` defines.
"""

from collections.abc import Iterator
from math import isqrt

import torch

from ...arithmetic.formats import NB, Format
from . import gemm_float64, reduction
from .machine_code import Kernel
from .threads import run_blocks
from .views import DTYPES, empty_words, float32_words, from_words

_scan_rows = Kernel("scan", "scan_rows")
_gemm_block = Kernel("gemm", "gemm_block")
_gemm_digits_block = Kernel("gemm", "gemm_digits_block")

LIMIT = 16 * 126
"""The norms of two rows, 16 * log2 of their length, may add up to this for a sum in 128 bits."""

SCRATCH_BYTES = 256 << 20
"""Scratch memory of one product; larger ones are cut into tiles."""

CHUNK_TERMS = 1 << 16
"""Terms of one tile; longer sums are added up as digits."""


def _tile_side(terms: int) -> int:
    """Rows and columns of a square tile: 16 bytes for each element of two operands, 8 a modulus for each result."""
    operand, result = 16 * terms + 64, 8 * gemm_float64.MAXIMUM_MODULI
    # result * side^2 + 2 * operand * side = SCRATCH_BYTES
    return max(16, (isqrt(operand * operand + result * SCRATCH_BYTES) - operand) // result)


def _tiles(rows: int, columns: int, terms: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, rows, first column, columns) of each tile."""
    side = _tile_side(min(terms, CHUNK_TERMS))
    for j in range(0, columns, side):
        for i in range(0, rows, side):
            yield i, min(side, rows - i), j, min(side, columns - j)


def _launch(
    kernel: Kernel, rows: int, columns: int, terms: int, x_at: int, x_stride: int, w_at: int, w_stride: int,
    engine: str, *target: int,
) -> None:  # fmt: skip
    """Scan the operands of one tile, choose its engine and run `kernel` on it."""
    scan = torch.empty((rows + columns) * (2 + terms), dtype=torch.int64)
    x_scan_at = scan.data_ptr()
    w_scan_at = x_scan_at + 8 * rows * (2 + terms)
    run_blocks(
        _scan_rows, rows + columns, 4 * (rows + columns) * terms,
        terms, x_at, x_stride, rows, x_scan_at, w_at, w_stride, columns, w_scan_at,
    )  # fmt: skip
    first = rows * (2 + terms) + columns
    count = gemm_float64.moduli_count(scan[rows : 2 * rows], scan[first : first + columns], terms, engine)
    sums = gemm_float64.residue_products(x_scan_at, w_scan_at, rows, columns, terms, count) if count else None
    run_blocks(
        kernel, rows, rows * columns * ((0 if count else terms) + 32),
        rows, columns, terms, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at,
        -1 if engine == "long_accumulator" else LIMIT,
        sums.data_ptr() if count else 0, count, gemm_float64.capacity(count), *target,
    )  # fmt: skip


def gemm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, form: Format, engine: str) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, on checked arguments."""
    x, w = float32_words(x), float32_words(w)
    bias = None if bias is None else float32_words(bias)
    (rows, terms), columns = x.shape, w.shape[0]
    if terms > CHUNK_TERMS:
        return _gemm_of_chunks(x, w, bias, form, engine)
    out = empty_words((rows, columns), form)
    x_at, w_at, out_at, bias_at = x.data_ptr(), w.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for i, height, j, width in _tiles(rows, columns, terms):
        _launch(
            _gemm_block, height, width, terms, x_at + 4 * i * terms, terms, w_at + 4 * j * terms, terms, engine,
            bias_at and bias_at + 4 * j, out_at + 4 * (i * columns + j), columns,
            form.significand_bits, form.exponent_bits,
        )  # fmt: skip
    return from_words(out, form)


def _gemm_of_chunks(x, w, bias, form: Format, engine: str) -> torch.Tensor:
    """Long sums: digits of a tile over all chunks of terms, then the bias, then the one rounding."""
    (rows, terms), columns = x.shape, w.shape[0]
    out = torch.empty((rows, columns), dtype=DTYPES[form.name])
    for i, height, j, width in _tiles(rows, columns, terms):
        digits = torch.zeros((height, width, NB), dtype=torch.int64)
        add_gemm_digits(digits, x[i : i + height], w[j : j + width], engine)
        if bias is not None:
            digits += reduction.sum_states(bias[j : j + width].view(1, 1, width))
        out[i : i + height, j : j + width] = reduction.finalize(digits, form, 1)
    return out


def add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous."""
    x, w = float32_words(x), float32_words(w)
    (rows, terms), columns = x.shape, w.shape[0]
    x_at, w_at, digits_at = x.data_ptr(), w.data_ptr(), digits.data_ptr()
    for i, height, j, width in _tiles(rows, columns, terms):
        for k in range(0, terms, CHUNK_TERMS):
            _launch(
                _gemm_digits_block, height, width, min(CHUNK_TERMS, terms - k),
                x_at + 4 * (i * terms + k), terms, w_at + 4 * (j * terms + k), terms, engine,
                digits_at + 8 * NB * (i * columns + j), columns,
            )  # fmt: skip
