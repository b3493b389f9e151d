"""Launches the kernels on windowed digits of `cuda_src/windowed_digits.cu`. The twin of `cpu.windowed_digits`."""

import torch

from ..arithmetic.formats import NB, Format
from .cuda import DTYPES, FORMAT_CODES, launch

_THREADS = 128
_NOTHING = 1 << 20
_MOST_PARTS = 64


def _launch(kernel: str, like: torch.Tensor, elements: int, *arguments: int) -> None:
    if elements:
        blocks = (-(-elements // _THREADS),)
        launch(like.device, "windowed_digits", kernel, blocks, _THREADS, *arguments, elements)


def _flag(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def bounds(states: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of contiguous states [rows * columns, NB]: int64 low, high, as `windowed_bounds` of the source says."""
    columns = states.numel() // NB // max(rows, 1)
    low = torch.full((rows,), _NOTHING, dtype=torch.int64, device=states.device)
    high = -low
    if rows and columns:
        parts = min(-(-columns // _THREADS), _MOST_PARTS)
        launch(
            states.device, "windowed_digits", "windowed_bounds", (rows, parts), _THREADS,
            states.data_ptr(), columns, low.data_ptr(), high.data_ptr(),
        )  # fmt: skip
    return low, high


def from_states(states: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> bool:
    """Fill `words` [count, elements] from contiguous states; False if a value lies outside the window."""
    count, elements = words.shape
    misfits = _flag(words)
    _launch(
        "windowed_from_states", words, elements,
        states.data_ptr(), _columns(base, elements), base.data_ptr(), words.data_ptr(), words.stride(0), count,
        misfits.data_ptr(),
    )  # fmt: skip
    return not misfits.item()


def add_to_states(words: torch.Tensor, base: torch.Tensor, states: torch.Tensor) -> None:
    """states += the values of `words` [count, elements]; contiguous states [elements, NB], left canonical."""
    count, elements = words.shape
    _launch(
        "windowed_add_to_states", words, elements,
        words.data_ptr(), words.stride(0), count, _columns(base, elements), base.data_ptr(), states.data_ptr(),
    )  # fmt: skip


def grow(words: torch.Tensor, lower_by: torch.Tensor, out: torch.Tensor) -> bool:
    """out = the values of `words` on bases lower by `lower_by` [rows]; False if `out` has too few words."""
    count, elements = words.shape
    misfits = _flag(words)
    _launch(
        "windowed_grow", words, elements,
        words.data_ptr(), words.stride(0), count, _columns(lower_by, elements), lower_by.data_ptr(),
        out.data_ptr(), out.stride(0), out.shape[0], misfits.data_ptr(),
    )  # fmt: skip
    return not misfits.item()


def carry(words: torch.Tensor) -> bool:
    """Carry in place; False if a last word is outside normal form."""
    count, elements = words.shape
    overflows = _flag(words)
    _launch("windowed_carry", words, elements, words.data_ptr(), words.stride(0), count, overflows.data_ptr())
    return not overflows.item()


def round_sum(
    operands: list[torch.Tensor], base: torch.Tensor, form: Format, denominator: int, out: torch.Tensor
) -> None:
    """out [elements] = the sums over operands [count, elements] of one window, divided and rounded once."""
    count, elements = operands[0].shape
    table = torch.tensor([(words.data_ptr(), words.stride(0)) for words in operands], dtype=torch.int64)
    table = table.pin_memory().to(out.device, non_blocking=True)  # from pageable memory it would wait for the device
    rounded = out if out.is_contiguous() else torch.empty(out.shape, dtype=DTYPES[form], device=out.device)
    _launch(
        "windowed_round", out, elements,
        table.data_ptr(), len(operands), count, _columns(base, elements), base.data_ptr(),
        rounded.data_ptr(), FORMAT_CODES[rounded.dtype], denominator,
    )  # fmt: skip
    if rounded is not out:
        out.copy_(rounded)


def _columns(per_row: torch.Tensor, elements: int) -> int:
    """Elements of one row, at least 1; the kernels divide by it."""
    return max(1, elements // max(1, per_row.numel()))
