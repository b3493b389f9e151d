"""Windowed digits: the bits of full digits in fewer bytes, whatever the window, the order and the number of parts."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.arithmetic.formats import DIGITS, FORMATS, NB
from det_lightning.arithmetic.long_accumulator import digits_of, value_of
from det_lightning.arithmetic.rounding import round_integer
from det_lightning.arithmetic.windowed_digits import MAXIMUM_STATES, WORD_BITS, words_of
from det_lightning.arithmetic.windowed_digits import value_of as value_of_words
from det_lightning.errors import InputError
from det_lightning.ops.digits import det_finalize, digits_value, normalise_digits
from det_lightning.ops.gemm import det_gemm_partial
from det_lightning.ops.windowed_digits import WindowedDigits, round_sum, window_bounds, window_for
from tests.ops.exact_oracle import from_patterns
from tests.same_bits import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
values = st.one_of(st.integers(-(2**600), 2**600), st.integers(-9, 9), st.integers(0, 599).map(lambda n: -(1 << n)))
denominators = st.sampled_from([1, 2, 3, 7, 8, 1000, 2**20, 3**13, 2**31 - 1, 2**31, 2**40 + 1, 0])


def digits_with(values: list[int]) -> torch.Tensor:
    """Digits [n, 1, NB] of integers in units of 2^-298."""
    return torch.tensor([[[*digits_of(value), 0, 0, 0]] for value in values])


def random_windows(count: int, shape: tuple[int, ...], parts: int, seed: int) -> list[WindowedDigits]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-140, -80, (shape[0],), generator=generator)
    words = torch.randint(-(2**25), 2**25, (parts, count, *shape), generator=generator, dtype=torch.int32)
    return [WindowedDigits(base, w) for w in words]


def full_sum(parts: list[WindowedDigits]) -> torch.Tensor:
    return normalise_digits(torch.stack([part.to_digits() for part in parts]).sum(dim=0))


@given(st.lists(values, min_size=1, max_size=4), st.sampled_from(DTYPES), denominators)
def test_every_value_comes_back_and_rounds_as_full_digits_do(integers, dtype, denominator):
    digits = digits_with(integers)
    windowed = WindowedDigits.from_digits(digits)
    assert torch.equal(windowed.to_digits(), digits)
    expected = det_finalize(digits, dtype=dtype, denominator=denominator)
    assert_same_bits(windowed.round(dtype=dtype, denominator=denominator), expected)


@given(st.lists(values, min_size=1, max_size=3), st.lists(values, min_size=3, max_size=3))
def test_sums_over_different_windows_are_exact(left, right):
    a, b = digits_with(left), digits_with(right[: len(left)])
    total = WindowedDigits.from_digits(a).add_(WindowedDigits.from_digits(b))
    for i, (p, q) in enumerate(zip(left, right, strict=False)):
        assert value_of(total.to_digits()[i, 0].tolist()) == p + q


@given(st.lists(st.integers(-(2**77), 2**77), min_size=1, max_size=5))
def test_words_are_those_of_the_definition(integers):
    windowed = WindowedDigits.from_digits(digits_with(integers), torch.full((len(integers),), -298), 3)
    for i, value in enumerate(integers):
        count = windowed.words.shape[0]
        assert windowed.words[:, i, 0].tolist() == words_of(value, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("denominator", [1, 3, 4, 1000])
def test_ties_and_their_neighbours_at_every_place_and_width(dtype, denominator):
    form = FORMATS[str(dtype).removeprefix("torch.")]
    integers = []
    for shift in range(0, 540, 3):
        for m in (1 << (form.significand_bits - 1), (1 << form.significand_bits) - 1, 1, 2):
            tie = ((2 * m + 1) * denominator) << shift
            integers += [tie, tie + 1, tie - 1, -tie, -tie - 1, 1 - tie]
    expected = from_patterns(
        [round_integer(value, -298, form, denominator) for value in integers], [len(integers), 1], dtype
    )
    windowed = WindowedDigits.from_digits(digits_with(integers))
    assert_same_bits(windowed.round(dtype=dtype, denominator=denominator), expected)
    # Every row on its own base, where most rows have a few words and the fast way decides them.
    for first in range(0, len(integers), 24):
        rows = slice(first, first + 24)
        windowed = WindowedDigits.from_digits(digits_with(integers[rows]))
        assert_same_bits(windowed.round(dtype=dtype, denominator=denominator), expected[rows])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 70])
def test_a_fused_sum_rounds_the_exact_sum(count, parts):
    windows = random_windows(count, (7, 41), parts, seed=count)
    total = full_sum(windows)
    for dtype in DTYPES:
        for denominator in (1, 8, 12):
            expected = det_finalize(total, dtype=dtype, denominator=denominator)
            assert_same_bits(round_sum(windows, dtype=dtype, denominator=denominator), expected)
    out = torch.full((7, 41), 5.0)
    assert round_sum(windows, out=out) is out
    assert_same_bits(out, det_finalize(total))


def test_words_of_the_largest_size_do_not_disturb_the_rounding():
    extremes = [-(2**31), 2**31 - 1, 0, 1, -1, 2**25, -(2**25), 2**30]
    count = 4
    words = torch.tensor(
        [[extremes[(i // 8**j) % 8] for i in range(8**count)] for j in range(count)], dtype=torch.int32
    )
    for base in (-298, -170, -120, 10):
        windowed = WindowedDigits(torch.tensor([base]), words)
        expected = [value_of_words(words[:, i].tolist()) for i in range(0, 8**count, 37)]
        rounded = windowed.round()[::37]
        assert_same_bits(
            rounded,
            from_patterns(
                [round_integer(v, base, FORMATS["float32"]) for v in expected], [len(expected)], torch.float32
            ),
        )


@given(st.permutations(range(6)), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_order_and_grouping_of_additions_do_not_matter(order, cuts):
    parts = random_windows(3, (5, 9), 6, seed=6)
    total = WindowedDigits.zeros((5, 9), parts[0].base, 3)
    for cut in sorted({0, *cuts, 6})[:-1]:
        group = [parts[i] for i in order][cut : min([c for c in [*cuts, 6] if c > cut])]
        partial = WindowedDigits(group[0].base, group[0].words.clone())
        for part in group[1:]:
            partial.add_(part)
        total.add_(partial)
    assert torch.equal(total.to_digits(), full_sum(parts))
    assert_same_bits(total.round(), det_finalize(full_sum(parts)))


def test_many_additions_carry_in_time_and_a_plain_int32_sum_would_not():
    base, largest = torch.tensor([-149]), torch.full((2, 3), 2**25 - 1, dtype=torch.int32)
    total = WindowedDigits.zeros((3,), base, 2)
    for _ in range(1000):
        total.add_(WindowedDigits(base, largest.clone()))
    exact = 1000 * value_of_words([2**25 - 1] * 2)
    assert digits_value(total.to_digits()[0]) == Fraction(exact) * Fraction(2) ** -149
    assert total.words.shape[0] > 2
    plain = sum(largest.clone() for _ in range(1000))
    assert value_of_words(plain[:, 0].tolist()) != exact


def test_one_plain_integer_sum_over_the_most_ranks_is_exact():
    parts = random_windows(3, (4, 33), MAXIMUM_STATES, seed=3)
    words = torch.stack([part.words for part in parts]).sum(dim=0, dtype=torch.int32)
    total = WindowedDigits(parts[0].base, words, states=MAXIMUM_STATES)
    assert torch.equal(total.to_digits(), full_sum(parts))
    assert_same_bits(total.round(), det_finalize(full_sum(parts)))
    assert torch.equal(total.normalise_().to_digits(), full_sum(parts))
    assert int(total.words.abs().max()) <= 1 << WORD_BITS - 1


def test_special_terms_decide_and_add_up():
    digits = digits_with([5, -7, 0, 3, 1])
    digits[1, 0, DIGITS] = 1
    digits[2, 0, DIGITS + 1] = 2
    other = digits_with([1, 1, 1, 1, 1])
    other[2, 0, DIGITS + 2] = 1
    other[3, 0, DIGITS + 2] = 4
    windowed = WindowedDigits.from_digits(digits).add_(WindowedDigits.from_digits(other))
    assert torch.equal(windowed.to_digits(), normalise_digits(digits + other))
    for denominator in (1, 3, 0):
        expected = det_finalize(digits + other, denominator=denominator)
        assert_same_bits(windowed.round(denominator=denominator), expected)
        both = [WindowedDigits.from_digits(digits), WindowedDigits.from_digits(other)]
        assert_same_bits(round_sum(both, denominator=denominator), expected)


def test_a_product_in_a_window_costs_a_fraction_of_its_full_digits():
    generator = torch.Generator().manual_seed(1)
    digits = det_gemm_partial(torch.randn(32, 64, generator=generator), torch.randn(48, 64, generator=generator))
    windowed = WindowedDigits.from_digits(digits)
    assert windowed.words.nbytes * 10 <= digits.nbytes
    assert torch.equal(windowed.to_digits(), digits)


def test_bounds_agree_over_ranks_by_a_minimum_and_a_maximum():
    a, b = digits_with([8, 0, -1, 2**500]), digits_with([5, 0, 1 << 40, 0])
    (low_a, high_a), (low_b, high_b) = window_bounds(a), window_bounds(b)
    base, words = window_for(torch.minimum(low_a, low_b), torch.maximum(high_a, high_b))
    assert base.tolist() == [-298, 0, -298, 500 - 298]
    parts = [WindowedDigits.from_digits(digits, base, words) for digits in (a, b)]
    assert all(torch.equal(part.base, base) and part.words.shape[0] == words for part in parts)
    assert torch.equal(parts[0].add_(parts[1]).to_digits(), normalise_digits(a + b))


def test_a_window_that_is_too_small_grows_instead_of_cutting():
    digits = digits_with([2**200 + 1, 3])
    for base in (-298, -290, -100, 298):
        windowed = WindowedDigits.from_digits(digits, torch.tensor([base, base]), 1)
        assert torch.equal(windowed.to_digits(), digits)


def test_a_slice_of_a_larger_buffer_serves_as_words():
    buffer = torch.zeros((3, 100), dtype=torch.int32)
    part = random_windows(3, (4, 5), 1, seed=2)[0]
    view = buffer[:, 30:50].view(3, 4, 5)
    windowed = WindowedDigits(part.base, view)
    windowed.add_(part)
    assert torch.equal(buffer[:, 30:50].view(3, 4, 5), part.words)
    assert torch.equal(buffer[:, :30], torch.zeros((3, 30), dtype=torch.int32))
    assert_same_bits(windowed.round(), part.round())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (5,), (2, 3, 4)])
def test_every_shape_goes_through(shape):
    digits = torch.zeros((*shape, NB), dtype=torch.int64)
    digits[..., 5] = 3
    windowed = WindowedDigits.from_digits(digits)
    assert torch.equal(windowed.add_(WindowedDigits.from_digits(digits)).to_digits(), 2 * digits)
    assert_same_bits(windowed.round(), det_finalize(2 * digits))


def test_wrong_arguments_are_refused_with_a_reason():
    base, words = torch.tensor([0, 0]), torch.zeros((2, 2, 3), dtype=torch.int32)
    good = WindowedDigits(base, words)
    for make, message in [
        (lambda: WindowedDigits(base, words.long()), "int32"),
        (lambda: WindowedDigits(base[:1], words), "int64 \\[2\\]"),
        (lambda: WindowedDigits(base - 299, words), "-298"),
        (lambda: WindowedDigits(base, words, states=64), "groups"),
        (lambda: WindowedDigits(base, words, torch.zeros(2, 3)), "specials"),
        (lambda: WindowedDigits(base, words.transpose(1, 2)), "contiguous"),
        (lambda: good.grow_(base + 1, 2), "cut off"),
        (lambda: good.add_(WindowedDigits.zeros((3, 2), torch.zeros(3, dtype=torch.int64), 2)), "differ"),
        (lambda: round_sum([]), "at least one"),
        (lambda: good.round(dtype=torch.float64), "float64"),
        (lambda: good.round(denominator=-1), "denominator"),
        (lambda: good.round(out=torch.zeros(3, 2)), "same"),
    ]:
        with pytest.raises(InputError, match=message):
            make()
