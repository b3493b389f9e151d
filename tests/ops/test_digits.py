"""Digits: combining, normalising and the final rounding, against the definition on Python integers."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.arithmetic.formats import FORMATS, NB
from det_lightning.arithmetic.long_accumulator import finalize, normalise
from det_lightning.errors import InputError
from det_lightning.ops.digits import det_combine, det_finalize, digits_value, normalise_digits, zero_digits
from det_lightning.ops.gemm import det_gemm_partial
from tests.ops.exact_oracle import from_patterns, wide_values
from tests.same_bits import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
int64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]))
states = st.lists(int64, min_size=18, max_size=18).map(lambda digits: [*digits, 0, 0, 0])
sparse_states = st.lists(st.tuples(st.integers(0, 17), int64), max_size=3).map(
    lambda places: [dict(places).get(j, 0) for j in range(18)] + [0, 0, 0]
)


@given(
    st.lists(st.one_of(states, sparse_states), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.one_of(st.just(1), st.integers(0, 2**31 - 1), st.integers(2**31, 2**70)),
)
def test_any_state_is_rounded_as_defined(rows, dtype, denominator):
    form = FORMATS[str(dtype).removeprefix("torch.")]
    expected = from_patterns([finalize(row, form, denominator) for row in rows], [len(rows)], dtype)
    assert_same_bits(det_finalize(torch.tensor(rows), dtype=dtype, denominator=denominator), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_their_neighbours_at_every_place(dtype):
    # 2 m + 1 half units at every shift, with nothing, something above and something below the tie.
    form = FORMATS[str(dtype).removeprefix("torch.")]
    rows = []
    for shift in range(0, 540):
        for m in (1 << (form.significand_bits - 1), (1 << form.significand_bits) - 1, 1, 2):
            for nudge in (-1, 0, 1):
                value = ((2 * m + 1) << shift) + (nudge if shift else 0)
                rows.append(normalise([value << 0 if j == 0 else 0 for j in range(18)] + [0, 0, 0]))
                rows.append(normalise([-value if j == 0 else 0 for j in range(18)] + [0, 0, 0]))
    expected = from_patterns([finalize(row, form) for row in rows], [len(rows)], dtype)
    assert_same_bits(det_finalize(torch.tensor(rows), dtype=dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_decide_before_digits(dtype):
    form = FORMATS[str(dtype).removeprefix("torch.")]
    rows = [
        [5] + [0] * 17 + list(counts)
        for counts in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 3, 7), (2, 3, 0), (0, 2**40, 0), (0, 0, 2**62)]
    ]
    for denominator in (0, 1, 6, 2**40):
        expected = from_patterns([finalize(row, form, denominator) for row in rows], [len(rows)], dtype)
        assert_same_bits(det_finalize(torch.tensor(rows), dtype=dtype, denominator=denominator), expected)


def test_dividing_rounds_once():
    x = torch.full((1, 3), 1.0)
    third = det_finalize(det_gemm_partial(x, x), denominator=9)
    assert_same_bits(third, torch.tensor([[1.0 / 3.0]], dtype=torch.float64).to(torch.float32))


def test_zero_over_zero_is_nan_and_a_number_over_zero_an_infinity_of_its_sign():
    state = torch.zeros(3, NB, dtype=torch.int64)
    state[1, 3], state[2, 3] = 7, -7
    expected = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert_same_bits(det_finalize(state, denominator=0), expected)


@given(st.lists(states.map(lambda s: [d >> 2 for d in s]), min_size=1, max_size=5))
def test_normalising_gives_the_canonical_state_of_the_same_value(rows):
    tensor = torch.tensor(rows)
    assert_same_bits(normalise_digits(tensor), torch.tensor([normalise(row) for row in rows]))
    assert_same_bits(tensor, torch.tensor(rows))


def test_combining_is_the_sum_of_values_in_any_grouping():
    parts = [det_gemm_partial(wide_values(i, 3, 20), wide_values(i + 9, 4, 20)) for i in range(5)]
    whole = det_combine(parts)
    grouped = det_combine([det_combine(parts[3:]), det_combine(parts[:2]), parts[2]])
    assert_same_bits(normalise_digits(whole), normalise_digits(grouped))
    assert digits_value(whole[2, 3]) == sum(digits_value(part[2, 3]) for part in parts)


def test_combining_does_not_touch_its_arguments():
    a, b = det_gemm_partial(torch.ones(1, 2), torch.ones(1, 2)), zero_digits((1, 1))
    before = a.clone()
    det_combine([a, b])[0, 0, 0] = 99
    assert_same_bits(a, before)


def test_zero_digits_have_the_shape_asked_for_and_are_zero():
    assert zero_digits((2, 3)).shape == (2, 3, NB)
    assert_same_bits(det_finalize(zero_digits((2, 0, 3))), torch.zeros(2, 0, 3))
    assert_same_bits(det_finalize(zero_digits(())), torch.zeros(()))


def test_the_value_of_one_state_is_a_fraction_or_special():
    assert digits_value(det_gemm_partial(torch.tensor([[0.5]]), torch.tensor([[0.75]]))[0, 0]) == Fraction(3, 8)
    infinite = det_gemm_partial(torch.tensor([[float("-inf")]]), torch.tensor([[2.0]]))[0, 0]
    assert digits_value(infinite) == float("-inf")


def test_states_of_any_strides_are_rounded():
    digits = det_gemm_partial(wide_values(1, 4, 9), wide_values(2, 5, 9))
    assert_same_bits(det_finalize(digits.transpose(0, 1)), det_finalize(digits).T)
    assert_same_bits(det_finalize(digits[::2, 1::2]), det_finalize(digits)[::2, 1::2])


MISUSES = {
    "float digits": (lambda d: det_finalize(d.double()), r"acc is torch.float64 \[2, 21\]; digits are int64"),
    "wrong size": (lambda d: det_finalize(d[:, :20]), r"acc is torch.int64 \[2, 20\]"),
    "a number": (lambda d: normalise_digits(3), "acc is a int"),
    "negative denominator": (
        lambda d: det_finalize(d, denominator=-1),
        "denominator is -1; it must be a Python integer",
    ),
    "float denominator": (lambda d: det_finalize(d, denominator=2.0), "denominator is 2.0"),
    "output dtype": (lambda d: det_finalize(d, dtype=torch.int32), "dtype is torch.int32; allowed"),
    "nothing to combine": (lambda d: det_combine([]), "pass a list of at least one digit tensor"),
    "a tensor to combine": (lambda d: det_combine(d), "pass a list"),
    "shapes to combine": (lambda d: det_combine([d, d[:1]]), r"states\[1\] is \[1, 21\] but states\[0\] is \[2, 21\]"),
    "value of many": (lambda d: digits_value(d), r"acc is \[2, 21\]; pass one state"),
}


@pytest.mark.parametrize(("call", "message"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_refused_with_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises(InputError, match=message):
        call(zero_digits((2,)))
