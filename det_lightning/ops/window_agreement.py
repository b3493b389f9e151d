"""How ranks agree on one window for their sums, and put them into it, without waiting for a device in between.

Each rank says what its digits need, an element-wise maximum over ranks makes it what all of them need, and every rank
fills words of the window that follows from it. `WindowedDigits` holds sums whose window one process chooses alone.
"""

import torch

from ..arithmetic.formats import NB
from ..arithmetic.windowed_digits import NOTHING
from ..kernels.dispatch import kernels_of
from .digits import check_states
from .windowed_digits import WindowedDigits


def window_needs(digits: torch.Tensor) -> torch.Tensor:
    """int64 [2 rows + 1]: every row's high, every row's -low, and 1 if special values are counted, else 0.

    digits: int64 [rows, columns, NB], any state. The values of a row are multiples of 2^low, smaller in magnitude than
    2^high; a row of zeros has -NOTHING for both.
    """
    check_states("window_needs", "digits", digits)
    return kernels_of("windowed_digits").needs(digits.contiguous(), digits.shape[0])


def needs_of_window(window: WindowedDigits) -> torch.Tensor:
    """The `window_needs` of its values, by its rows. A high may be one more than it must."""
    found = kernels_of("windowed_digits").needs_of_words(window.planes(), window.base)
    if window.specials is not None:
        found[-1:].fill_(1)
    return found


def no_needs(rows: int, device: torch.device) -> torch.Tensor:
    """The `window_needs` of zeros."""
    found = torch.full((2 * rows + 1,), -NOTHING, dtype=torch.int64, device=device)
    found[-1:].zero_()
    return found


def agreed_window(needs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(base int64 [rows], facts int64 [4]) of the window that `needs` asks for; at least one row.

    Facts: 1 if special values are counted, else 0; how many bits the widest row has (-1: there are only zeros); minus the
    lowest base; the highest base.
    """
    return kernels_of("windowed_digits").agree(needs)


def fill_words(digits: torch.Tensor, base: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fills `words` with the finite values of `digits` in the window of `base`, in normal form.

    Args:
        digits: int64 [rows, columns, NB], any state.
        base: int64 [rows].
        words: contiguous int32 [shares, count, rows / shares, columns]: for each share of the rows the words of a window.

    Returns:
        int64 [1]: 1 if a value lies outside the window, else 0.
    """
    shares, count = words.shape[:2]
    return kernels_of("windowed_digits").fill(digits.view(-1, NB), base, words.view(shares, count, -1))


def refill_words(window: WindowedDigits, base: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Fills `words`, int32 [count, rows, columns], with the finite values of a window on other bases, in normal form.

    base: int64, one for each of `window.base`. Returns int64 [1]: 1 if a value does not fit there, else 0.
    """
    return kernels_of("windowed_digits").refill(window.planes(), window.base - base, words.view(words.shape[0], -1))
