"""Launches the kernels on windowed digits: `native.windowed_digits` and `native.windowed_rounding`."""

import torch

from ...arithmetic.formats import DIGITS, NB, Format
from .machine_code import Kernel
from .threads import run_blocks
from .views import empty_words, from_words

_bounds_block = Kernel("windowed_digits", "bounds_block")
_bounds_of_words_block = Kernel("windowed_digits", "bounds_of_words_block")
_from_states_block = Kernel("windowed_digits", "from_states_block")
_add_to_states_block = Kernel("windowed_digits", "add_to_states_block")
_grow_block = Kernel("windowed_digits", "grow_block")
_round_block = Kernel("windowed_rounding", "round_block")
_carry_block = Kernel("windowed_rounding", "carry_block")

_TILE = 256
"""Elements that `native.windowed_rounding` works on at a time."""

_PART_COLUMNS = 1 << 12
"""Columns that one block of a scan for bounds takes."""


def bounds(states: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of contiguous states [rows * columns, NB]: int64 low, high, as `native.windowed_digits.bounds_block`."""
    columns = states.numel() // NB // max(rows, 1)
    parts = max(1, -(-columns // _PART_COLUMNS))
    low, high = torch.empty((2, rows, parts), dtype=torch.int64)
    run_blocks(
        _bounds_block, rows * parts, 40 * rows * columns,
        states.data_ptr(), columns, parts, _PART_COLUMNS, low.data_ptr(), high.data_ptr(),
    )  # fmt: skip
    return low.amin(dim=1), high.amax(dim=1)


def needs(states: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [2 rows + 1]: every row's high, every row's -low, and 1 if a state counts special values, else 0.

    A maximum over ranks agrees on a window for all of them.
    """
    low, high = bounds(states, rows)
    special = states.view(-1, NB)[:, DIGITS:].any()
    return torch.cat([high, -low, special.long().view(1)])


def needs_of_words(words: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """`needs` of the values of `words` [count, elements], a row of them for each base; none of them is special."""
    count, elements = words.shape
    rows = base.numel()
    found = torch.zeros(2 * rows + 1, dtype=torch.int64)
    high, low = found[:rows], found[rows : 2 * rows]
    run_blocks(
        _bounds_of_words_block, rows, 4 * elements * count,
        words.data_ptr(), words.stride(0), count, elements // max(1, rows), base.data_ptr(), low.data_ptr(), high.data_ptr(),
    )  # fmt: skip
    low.neg_()
    return found


def agree(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(base int64 [rows], facts int64 [4]) of `needs`: low, or 0 for a row of zeros; whether special values are counted,
    the widest row in bits (-1: nothing but zeros), minus the lowest base, the highest base."""
    rows = len(found) // 2
    high, low = found[:rows], -found[rows : 2 * rows]
    used = low <= high
    base = torch.where(used, low, 0)
    return base, torch.stack([found[-1], torch.where(used, high - low, -1).max(), -base.min(), base.max()])


def fill(states: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fill `words` [shares, count, elements of a share] from contiguous states; rows do not cross shares.

    Returns int64 [1]: 1 if a value lies outside the window, else 0.
    """
    shares, count, share = words.shape
    misfits, rows = torch.zeros(1, dtype=torch.int64), base.numel() // shares
    for number, part in enumerate(words):
        run_blocks(
            _from_states_block, share, 80 * share,
            states.data_ptr() + number * share * NB * states.element_size(), max(1, share // max(rows, 1)),
            base.data_ptr() + number * rows * base.element_size(),
            part.data_ptr(), part.stride(0), count, misfits.data_ptr(),
        )  # fmt: skip
    return misfits


def from_states(states: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> bool:
    """Fill `words` [count, elements] from contiguous states; False if a value lies outside the window."""
    return not fill(states, base, words.unsqueeze(0)).item()


def add_to_states(words: torch.Tensor, base: torch.Tensor, states: torch.Tensor) -> None:
    """states += the values of `words` [count, elements]; contiguous states [elements, NB], left canonical."""
    count, elements = words.shape
    run_blocks(
        _add_to_states_block, elements, 80 * elements,
        words.data_ptr(), words.stride(0), count, _columns(base, elements), base.data_ptr(), states.data_ptr(),
    )  # fmt: skip


def refill(words: torch.Tensor, lower_by: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = the values of `words` on bases that are lower by `lower_by` [rows], or higher where it is negative.

    Returns int64 [1]: 1 if `out` does not hold a value, above or below, else 0.
    """
    count, elements = words.shape
    misfits = torch.zeros(1, dtype=torch.int64)
    run_blocks(
        _grow_block, elements, 10 * elements * out.shape[0],
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
    overflows = torch.zeros(1, dtype=torch.int64)
    run_blocks(
        _carry_block, elements, 2 * elements * count,
        words.data_ptr(), words.stride(0), count, overflows.data_ptr(),
    )  # fmt: skip
    return not overflows.item()


def round_sum(
    operands: list[torch.Tensor], base: torch.Tensor, form: Format, denominator: int, out: torch.Tensor
) -> None:
    """out [elements] = the sums over operands [count, elements] of one window, divided and rounded once."""
    count, elements = operands[0].shape
    table = torch.tensor([(words.data_ptr(), words.stride(0)) for words in operands], dtype=torch.int64)
    zeros = torch.zeros(_TILE, dtype=torch.int32)
    halvings = denominator.bit_length() - 1 if denominator & (denominator - 1) == 0 else 0
    divisor = denominator >> halvings
    words = out if form.bits == 32 and out.is_contiguous() else empty_words((elements,), form)
    run_blocks(
        _round_block, elements, 4 * elements * count * (len(operands) + 2),
        table.data_ptr(), len(operands), zeros.data_ptr(), count, _columns(base, elements), base.data_ptr(),
        words.data_ptr(), denominator, divisor, halvings, form.significand_bits, form.exponent_bits,
    )  # fmt: skip
    if words is not out:
        out.copy_(from_words(words, form).view(out.shape))


def _columns(per_row: torch.Tensor, elements: int) -> int:
    """Elements of one row, at least 1; the kernels divide by it."""
    return max(1, elements // max(1, per_row.numel()))
