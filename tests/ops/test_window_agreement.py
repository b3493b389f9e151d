"""Windows that ranks agree on: what sums need, and words on the bases that follow, from full digits and from other words."""

from fractions import Fraction

import pytest
import torch

from det_lightning.arithmetic.formats import DIGITS, NB
from det_lightning.arithmetic.windowed_digits import MAXIMUM_STATES, words_for
from det_lightning.ops.digits import digits_value
from det_lightning.ops.gemm import det_gemm_partial
from det_lightning.ops.window_agreement import (
    agreed_window,
    fill_words,
    needs_of_window,
    no_needs,
    refill_words,
    window_needs,
)
from det_lightning.ops.windowed_digits import WindowedDigits
from tests.ops.exact_oracle import wide_values


def digits_of(rows: int, columns: int, seed: int, spread: int = 40) -> torch.Tensor:
    """int64 [rows, columns, NB]; the last row is zero."""
    x, w = wide_values(seed, rows, 3, spread=spread), wide_values(seed + 1, columns, 3, spread=spread)
    x[-1] = 0
    return det_gemm_partial(x, w)


@pytest.mark.parametrize("states", [1, 2, MAXIMUM_STATES])
def test_a_window_needs_what_its_digits_need_or_one_bit_more(states):
    digits = digits_of(5, 64, 3)
    window = WindowedDigits.from_digits(digits)
    window.words.mul_(states)
    window.states = states
    digits, found = window.to_digits(), needs_of_window(window)
    assert torch.equal(found[5:], window_needs(digits)[5:])
    for row, high in zip(digits[:4], found[:4].tolist(), strict=True):
        largest = max(abs(digits_value(state)) for state in row)
        assert Fraction(2) ** (high - 2) <= largest < Fraction(2) ** high
    window.specials = torch.zeros((5, 64, NB - DIGITS), dtype=torch.int64)
    assert needs_of_window(window)[-1] == 1


def test_rows_of_zeros_need_nothing():
    zeros = WindowedDigits.zeros((3, 8), torch.tensor([-298, 0, 100]), 4)
    assert torch.equal(needs_of_window(zeros), no_needs(3, torch.device("cpu")))


@pytest.mark.parametrize("shares", [1, 3])
def test_words_on_agreed_bases_are_those_of_the_digits(shares):
    one, other = digits_of(3, 256, 7), digits_of(3, 256, 8, spread=5)
    base, facts = agreed_window(torch.maximum(window_needs(one), needs_of_window(WindowedDigits.from_digits(other))))
    count = words_for(0, int(facts[1]))
    for digits in (one, other):
        wanted = torch.empty((1, count, 3, 256), dtype=torch.int32)
        assert not fill_words(digits, base, wanted)
        window = WindowedDigits.from_digits(digits, torch.full((3,), -298), 3)
        rooms = torch.full((shares, count, 3 // shares, 256), 7, dtype=torch.int32)
        for share in range(shares):
            rows = slice(share * 3 // shares, (share + 1) * 3 // shares)
            assert not refill_words(window.rows(rows), base[rows], rooms[share])
        assert torch.equal(rooms.transpose(0, 1).reshape(count, 3, 256), wanted[0])


def test_what_does_not_fit_is_told_above_and_below():
    digits = digits_of(2, 64, 9)
    window = WindowedDigits.from_digits(digits)
    base, facts = agreed_window(window_needs(digits))
    for shift, count in ((1, words_for(0, int(facts[1]))), (0, 1)):
        assert refill_words(window, base + shift, torch.empty((count, 2, 64), dtype=torch.int32)) == 1


def test_rows_cut_into_blocks_share_the_words():
    digits = digits_of(4, 96, 5)
    window = WindowedDigits.from_digits(digits)
    blocks = window.in_rows_of(32)
    assert blocks.words.data_ptr() == window.words.data_ptr() and tuple(blocks.shape) == (12, 32)
    assert torch.equal(blocks.to_digits(), window.to_digits().view(12, 32, NB))
    assert torch.equal(blocks.rows(slice(3, 6)).to_digits(), window.to_digits().view(12, 32, NB)[3:6])
