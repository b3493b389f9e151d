"""Launches the exact products: cuts them into tiles of bounded memory and chooses an engine for each.

The choice changes the time only: every kernel below computes the integer that `arithmetic.long_accumulator` defines.
"""

from collections.abc import Iterator
from math import isqrt

import torch

from ...arithmetic.formats import NB, Format
from . import gemm_float64, reduction
from .machine_code import Kernel
from .threads import run_blocks
from .views import DTYPES, float32_words, from_words

_scan_rows = Kernel("gemm", "scan_rows")
_gemm_block = Kernel("gemm", "gemm_block")
_gemm_digits_block = Kernel("gemm", "gemm_digits_block")

LIMIT = 16 * 126
"""Norms (16 * log2) of two rows may add up to this for 128-bit sums."""

SCRATCH_BYTES = 256 << 20
"""Scratch memory of one product; larger ones are cut into tiles."""

CHUNK_TERMS = 1 << 16
"""Terms of one tile; longer sums are added up as digits."""


def _tile_side(terms: int) -> int:
    """Rows and columns of a square tile: 2 operands of 16 bytes an element, and 8 bytes a modulus for each result."""
    operand, result = 16 * terms + 64, 8 * gemm_float64.MAXIMUM_MODULI
    # result * s^2 + 2 * operand * s = SCRATCH_BYTES
    return max(16, (isqrt(operand * operand + result * SCRATCH_BYTES) - operand) // result)


def _tiles(rows: int, columns: int, terms: int) -> Iterator[tuple[int, int, int, int]]:
    side = _tile_side(min(terms, CHUNK_TERMS))
    for j in range(0, columns, side):
        for i in range(0, rows, side):
            yield i, min(side, rows - i), j, min(side, columns - j)


def _scan(at: int, stride: int, rows: int, terms: int) -> torch.Tensor:
    scan = torch.empty(rows * (2 + terms), dtype=torch.int64)
    run_blocks(_scan_rows, rows, 6 * rows * terms, at, rows, terms, stride, scan.data_ptr())
    return scan


def _launch(kernels: tuple[Kernel, Kernel], x_at, x_stride, w_at, w_stride, rows, columns, terms, engine, *target) -> None:
    """Run a plain kernel or its twin with residues on one tile; `target` is what they have in common at the end."""
    x_scan, w_scan = _scan(x_at, x_stride, rows, terms), _scan(w_at, w_stride, columns, terms)
    limit = -1 if engine == "long_accumulator" else LIMIT
    operands = (x_at, x_stride, w_at, w_stride, x_scan.data_ptr(), w_scan.data_ptr(), rows, columns, terms, limit)
    count = gemm_float64.moduli_count(x_scan, w_scan, rows, columns, terms, engine)
    steps = rows * columns * (terms + 32)
    if count == 0:
        run_blocks(kernels[0], rows, steps, *operands, *target)
        return
    sums = gemm_float64.residue_products(x_scan, w_scan, rows, columns, terms, count)
    capacity = gemm_float64.capacity(count)
    run_blocks(kernels[1], rows, steps, sums.data_ptr(), count, capacity, *operands, *target)


def gemm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, form: Format, engine: str) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, on checked arguments."""
    x, w = float32_words(x), float32_words(w)
    bias = None if bias is None else float32_words(bias)
    (rows, terms), columns = x.shape, w.shape[0]
    if terms > CHUNK_TERMS:
        return _gemm_of_chunks(x, w, bias, form, engine)
    out = torch.empty((rows, columns), dtype=torch.int32)
    x_at, w_at, out_at, bias_at = x.data_ptr(), w.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for i, height, j, width in _tiles(rows, columns, terms):
        _launch(
            (_gemm_block, gemm_float64.rebuild_block),
            x_at + 4 * i * terms, terms, w_at + 4 * j * terms, terms, height, width, terms, engine,
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
                (_gemm_digits_block, gemm_float64.rebuild_digits_block),
                x_at + 4 * (i * terms + k), terms, w_at + 4 * (j * terms + k), terms,
                height, width, min(CHUNK_TERMS, terms - k), engine,
                digits_at + 8 * NB * (i * columns + j), columns,
            )  # fmt: skip
