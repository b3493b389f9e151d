"""Launches the exact products: cuts them into tiles of bounded memory and chooses an engine for each.

The choice changes the time only: every way through `native.gemm` ends in the integer that
`arithmetic.long_accumulator` defines.
"""

from collections.abc import Callable
from math import isqrt

import torch

from ...arithmetic.formats import NB, Format
from ...errors import InputError
from . import gemm_float64, gemm_int8, reduction
from .machine_code import Kernel
from .scan import Scan, fill_integers, scan_operands
from .threads import run_blocks
from .views import DTYPES, empty_words, float32_rows, float32_words, from_words
from .workspace import Cutter, padded, workspace

_gemm_block = Kernel("gemm", "gemm_block")
_gemm_digits_block = Kernel("gemm", "gemm_digits_block")

SCRATCH_BYTES = 256 << 20
"""Extra memory of one product unless the caller says otherwise; larger products are cut into tiles."""

CHUNK_TERMS = 1 << 16
"""Terms of one tile; longer sums are added up as digits."""


def _tile_side(terms: int, scratch_bytes: int) -> int:
    """Rows and columns of a square tile: per modulus a byte for each element of two operands, 4 for each result."""
    operand, result = gemm_int8.MAXIMUM_MODULI * terms + 64, 4 * gemm_int8.MAXIMUM_MODULI
    # result * side^2 + 2 * operand * side = scratch_bytes
    return max(16, (isqrt(operand * operand + result * scratch_bytes) - operand) // result)


def _run_tiles(
    rows: int, columns: int, terms: int, scratch_bytes: int, launch: Callable[[int, int, int, int], bool]
) -> None:
    """Call `launch(first row, rows, first column, columns)` over tiles; a tile that it refuses is cut into quarters."""
    side = _tile_side(min(terms, CHUNK_TERMS), scratch_bytes)
    tiles = [
        (i, min(side, rows - i), j, min(side, columns - j))
        for j in range(0, columns, side)
        for i in range(0, rows, side)
    ]
    while tiles:
        i, height, j, width = tile = tiles.pop()
        if not launch(*tile):
            top, left = (height + 1) // 2, (width + 1) // 2
            halves = [(i, top), (i + top, height - top)]
            tiles += [(*rows, *part) for rows in halves for part in ((j, left), (j + left, width - left))]


def _run(
    kernel: Kernel, rows: int, columns: int, terms: int, x_at: int, x_stride: int, w_at: int, w_stride: int,
    engine: str, scratch_bytes: int, *target: int,
) -> bool:  # fmt: skip
    """Scan the operands of one tile, choose its engine and run `kernel` on it; False if that takes too much memory."""
    if rows == 0 or columns == 0:
        return True
    x, w = scan_operands(rows, columns, terms, x_at, x_stride, w_at, w_stride, engine)
    way = gemm_int8 if _takes_int8(x, w, terms, engine) else gemm_float64
    count = way.moduli_count(x, w, terms, engine)
    needed = way.scratch_bytes(x, w, terms, count) if count else _integers_bytes(x, w, terms, engine)
    if rows + columns > 32 and needed > scratch_bytes:
        # Rows of several bands, or many moduli: cut further. A few rows are taken as they are.
        return False
    with workspace(needed) as buffer:
        memory, x_integers_at, w_integers_at, sums_facts, capacity = Cutter(buffer), 0, 0, (0, 0, 0), 0
        if count:
            sums, capacity = way.residue_products(x, w, terms, count, memory), way.capacity(count)
            sums_facts = sums.data_ptr(), sums.stride(1), sums.stride(0)
        elif needed:
            x_integers_at, w_integers_at = (_integers_at(scan, terms, memory) for scan in (x, w))
        run_blocks(
            kernel, rows * columns, rows * columns * ((0 if count else terms) + 32),
            rows, columns, terms, x_at, x_stride, w_at, w_stride, x.at, w.at, x.bands, w.bands, x.first_at, w.first_at,
            x_integers_at, w_integers_at, *sums_facts, way.ENGINE, count, capacity, *target,
        )  # fmt: skip
    return True


def _integers_bytes(x: Scan, w: Scan, terms: int, engine: str) -> int:
    """Scratch of a product without residues."""
    return 0 if engine == "long_accumulator" else padded(8 * x.bands * terms) + padded(8 * w.bands * terms)


def _integers_at(scan: Scan, terms: int, memory: Cutter) -> int:
    out = memory.take(torch.int64, scan.bands, terms)
    fill_integers(scan, terms, out)
    return out.data_ptr()


def _takes_int8(x: Scan, w: Scan, terms: int, engine: str) -> bool:
    if engine == "int8":
        if not gemm_int8.products_are_exact():
            raise InputError(
                "engine is 'int8', but int8 products of this processor and torch saturate or are missing (torch._int_mm "
                "failed the self-test); use 'auto' or 'float64', which give the same bits"
            )
        return True
    return (
        engine == "auto" and gemm_int8.is_worth_starting(x, w, terms) and gemm_int8.is_usable() and gemm_int8.is_fast()
    )


def default_engine(like: torch.Tensor) -> str:
    """What "auto" takes for large products on the device of `like`: "int8" or "float64"."""
    return "int8" if gemm_int8.is_fast() else "float64"


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    form: Format,
    engine: str,
    scratch_bytes: int | None = None,
) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, on checked arguments."""
    scratch_bytes = SCRATCH_BYTES if scratch_bytes is None else scratch_bytes
    x, w = float32_rows(x), float32_rows(w)
    bias = None if bias is None else float32_words(bias)
    (rows, terms), columns = x.shape, w.shape[0]
    if terms > CHUNK_TERMS:
        return _gemm_of_chunks(x, w, bias, form, engine, scratch_bytes)
    out = empty_words((rows, columns), form)
    x_stride, w_stride = x.stride(0), w.stride(0)
    x_at, w_at, out_at, bias_at = x.data_ptr(), w.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()

    def launch(i: int, height: int, j: int, width: int) -> bool:
        return _run(
            _gemm_block, height, width, terms, x_at + 4 * i * x_stride, x_stride, w_at + 4 * j * w_stride, w_stride,
            engine, scratch_bytes, bias_at and bias_at + 4 * j, out_at + 4 * (i * columns + j), columns,
            form.significand_bits, form.exponent_bits,
        )  # fmt: skip

    _run_tiles(rows, columns, terms, scratch_bytes, launch)
    return from_words(out, form)


def _gemm_of_chunks(x, w, bias, form: Format, engine: str, scratch_bytes: int) -> torch.Tensor:
    """Long sums: digits of a tile over all chunks of terms, then the bias, then the one rounding."""
    (rows, terms), columns = x.shape, w.shape[0]
    out = torch.empty((rows, columns), dtype=DTYPES[form.name])

    def launch(i: int, height: int, j: int, width: int) -> bool:
        digits = torch.zeros((height, width, NB), dtype=torch.int64)
        add_gemm_digits(digits, x[i : i + height], w[j : j + width], engine, scratch_bytes)
        if bias is not None:
            digits += reduction.sum_states(bias[j : j + width].view(1, 1, width))
        out[i : i + height, j : j + width] = reduction.finalize(digits, form, 1)
        return True

    _run_tiles(rows, columns, terms, scratch_bytes, launch)
    return out


def add_gemm_digits(
    digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str, scratch_bytes: int | None = None
) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous."""
    scratch_bytes = SCRATCH_BYTES if scratch_bytes is None else scratch_bytes
    x, w = float32_rows(x), float32_rows(w)
    (rows, terms), columns = x.shape, w.shape[0]
    x_stride, w_stride = x.stride(0), w.stride(0)
    x_at, w_at, digits_at = x.data_ptr(), w.data_ptr(), digits.data_ptr()
    for k in range(0, terms, CHUNK_TERMS):

        def launch(i: int, height: int, j: int, width: int, k: int = k) -> bool:
            return _run(
                _gemm_digits_block, height, width, min(CHUNK_TERMS, terms - k),
                x_at + 4 * (i * x_stride + k), x_stride, w_at + 4 * (j * w_stride + k), w_stride, engine, scratch_bytes,
                digits_at + 8 * NB * (i * columns + j), columns,
            )  # fmt: skip

        _run_tiles(rows, columns, terms, scratch_bytes, launch)
