"""Launches the exact products of `native.gemm`."""

import torch

from ...arithmetic.formats import Format
from .machine_code import Kernel
from .threads import run_blocks
from .views import float32_words, from_words

_scan_rows = Kernel("gemm", "scan_rows")
_gemm_block = Kernel("gemm", "gemm_block")
_gemm_digits_block = Kernel("gemm", "gemm_digits_block")


def _scan(words: torch.Tensor) -> torch.Tensor:
    rows, terms = words.shape
    scan = torch.empty(rows * (2 + terms), dtype=torch.int64)
    run_blocks(_scan_rows, rows, 4 * rows * terms, words.data_ptr(), rows, terms, scan.data_ptr())
    return scan


def _limit(terms: int, engine: str) -> int:
    """The largest sum of two row widths that 128 bits hold: terms * 2^limit < 2^126."""
    return -1 if engine == "long_accumulator" else 126 - terms.bit_length()


def gemm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, form: Format, engine: str) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, on checked arguments."""
    x, w = float32_words(x), float32_words(w)
    bias = None if bias is None else float32_words(bias)
    (rows, terms), columns = x.shape, w.shape[0]
    x_scan, w_scan = _scan(x), _scan(w)
    out = torch.empty((rows, columns), dtype=torch.int32)
    run_blocks(
        _gemm_block, rows, rows * columns * (terms + 16),
        x.data_ptr(), w.data_ptr(), x_scan.data_ptr(), w_scan.data_ptr(), rows, columns, terms, _limit(terms, engine),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), form.significand_bits, form.exponent_bits,
    )  # fmt: skip
    return from_words(out, form)


def add_gemm_digits(digits: torch.Tensor, x: torch.Tensor, w: torch.Tensor, engine: str) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous."""
    x, w = float32_words(x), float32_words(w)
    (rows, terms), columns = x.shape, w.shape[0]
    x_scan, w_scan = _scan(x), _scan(w)
    run_blocks(
        _gemm_digits_block, rows, rows * columns * (terms + 64),
        x.data_ptr(), w.data_ptr(), x_scan.data_ptr(), w_scan.data_ptr(), rows, columns, terms, _limit(terms, engine),
        digits.data_ptr(),
    )  # fmt: skip
