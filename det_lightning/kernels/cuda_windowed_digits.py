"""Launches the kernels on windowed digits of `cuda_src/windowed_digits.cu`. The twin of `cpu.windowed_digits`."""

import torch

from ..arithmetic.formats import NB, Format
from ..arithmetic.windowed_digits import NOTHING
from .cuda import DTYPES, FORMAT_CODES, launch

_THREADS = 128
_MOST_PARTS = 64
_MOST_SHORT_WORDS, _MOST_WORDS_OF_LEADING = 4, 8
"""What `windowed_round` and `windowed_round_eight` take; `windowed_round_long` takes any number."""


def _launch(kernel: str, like: torch.Tensor, elements: int, *arguments: int) -> None:
    if elements:
        blocks = (-(-elements // _THREADS),)
        launch(like.device, "windowed_digits", kernel, blocks, _THREADS, *arguments, elements)


def _flag(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def needs(states: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [2 rows + 1] of contiguous states [rows * columns, NB]: `windowed_needs` of the source."""
    columns = states.numel() // NB // max(rows, 1)
    return _needs("windowed_needs", states.device, rows, columns, states.data_ptr(), columns)


def needs_of_words(words: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """`needs` of the values of `words` [count, elements], a row of them for each base; nothing here waits."""
    count, elements = words.shape
    columns = _columns(base, elements)
    return _needs(
        "windowed_needs_of_words", words.device, base.numel(), columns if elements else 0,
        words.data_ptr(), words.stride(0), count, columns, base.data_ptr(),
    )  # fmt: skip


def _needs(kernel: str, device: torch.device, rows: int, columns: int, *arguments: int) -> torch.Tensor:
    found = torch.full((2 * rows + 1,), -NOTHING, dtype=torch.int64, device=device)
    found[2 * rows :].zero_()
    if rows and columns:
        parts = min(-(-columns // _THREADS), _MOST_PARTS)
        launch(device, "windowed_digits", kernel, (rows, parts), _THREADS, *arguments, found.data_ptr())
    return found


def bounds(states: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row int64 low, high of contiguous states [rows * columns, NB]."""
    found = needs(states, rows)
    return -found[rows : 2 * rows], found[:rows]


def agree(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(base int64 [rows], facts int64 [4]) of `needs`, `windowed_agree` of the source; nothing here waits."""
    rows = len(found) // 2
    base = torch.empty(rows, dtype=torch.int64, device=found.device)
    facts = torch.full((4,), -NOTHING, dtype=torch.int64, device=found.device)
    facts[0].zero_()
    facts[1].fill_(-1)
    blocks = min(-(-rows // _THREADS), _MOST_PARTS)
    launch(
        found.device, "windowed_digits", "windowed_agree", (blocks,), _THREADS,
        found.data_ptr(), base.data_ptr(), facts.data_ptr(), rows,
    )  # fmt: skip
    return base, facts


def fill(states: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fill `words` [shares, count, elements of a share] from contiguous states.

    Returns int64 [1] on the device: 1 if a value lies outside the window, else 0.
    """
    shares, count, share = words.shape
    misfits, elements = _flag(words), shares * share
    _launch(
        "windowed_from_states", words, elements,
        states.data_ptr(), _columns(base, elements), base.data_ptr(), words.data_ptr(), words.stride(1), count,
        max(share, 1), words.stride(0), misfits.data_ptr(),
    )  # fmt: skip
    return misfits


def from_states(states: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> bool:
    """Fill `words` [count, elements] from contiguous states; False if a value lies outside the window."""
    return not fill(states, base, words.unsqueeze(0)).item()


def add_to_states(words: torch.Tensor, base: torch.Tensor, states: torch.Tensor) -> None:
    """states += the values of `words` [count, elements]; contiguous states [elements, NB], left canonical."""
    count, elements = words.shape
    _launch(
        "windowed_add_to_states", words, elements,
        words.data_ptr(), words.stride(0), count, _columns(base, elements), base.data_ptr(), states.data_ptr(),
    )  # fmt: skip


def refill(words: torch.Tensor, lower_by: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = the values of `words` on bases that are lower by `lower_by` [rows], or higher where it is negative.

    Returns int64 [1] on the device: 1 if `out` does not hold a value, above or below, else 0.
    """
    count, elements = words.shape
    misfits = _flag(words)
    _launch(
        "windowed_grow", words, elements,
        words.data_ptr(), words.stride(0), count, _columns(lower_by, elements), lower_by.data_ptr(),
        out.data_ptr(), out.stride(0), out.shape[0], misfits.data_ptr(),
    )  # fmt: skip
    return misfits


def grow(words: torch.Tensor, lower_by: torch.Tensor, out: torch.Tensor) -> bool:
    """`refill`; False if `out` does not hold a value."""
    return not refill(words, lower_by, out).item()


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
    plane, distance = operands[0].stride(0), 0
    if len(operands) > 1:
        distance = (operands[1].data_ptr() - operands[0].data_ptr()) // operands[0].element_size()
    table = None if _evenly_spaced(operands, plane, distance) else _table(operands, out.device)
    rounded = out if out.is_contiguous() else torch.empty(out.shape, dtype=DTYPES[form], device=out.device)
    arguments = (
        operands[0].data_ptr(), plane, distance, 0 if table is None else table.data_ptr(), len(operands), count,
        _columns(base, elements), base.data_ptr(), rounded.data_ptr(), FORMAT_CODES[rounded.dtype], denominator,
    )  # fmt: skip
    if count <= _MOST_WORDS_OF_LEADING:
        kernel = "windowed_round" if count <= _MOST_SHORT_WORDS else "windowed_round_eight"
        _launch(kernel, out, elements, *arguments, *_divisor(denominator))
    else:
        _launch("windowed_round_long", out, elements, *arguments)
    if rounded is not out:
        out.copy_(rounded)


def _columns(per_row: torch.Tensor, elements: int) -> int:
    """Elements of one row, at least 1; the kernels divide by it."""
    return max(1, elements // max(1, per_row.numel()))


def _divisor(denominator: int) -> tuple[int, int, int]:
    """The `Divisor` of the source: normal, inverse, shift."""
    shift = 32 - denominator.bit_length()
    normal = denominator << shift
    return normal, ((1 << 64) - 1) // normal - (1 << 32), shift


def _evenly_spaced(operands: list[torch.Tensor], plane: int, distance: int) -> bool:
    begin, step = operands[0].data_ptr(), distance * operands[0].element_size()
    return all(
        words.data_ptr() == begin + place * step and words.stride(0) == plane for place, words in enumerate(operands)
    )


def _table(operands: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    table = torch.tensor([(words.data_ptr(), words.stride(0)) for words in operands], dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True)  # from pageable memory it would wait for the device
