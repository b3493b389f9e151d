"""The one rounding against the nearest float found among fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from det_lightning.arithmetic.rounding import round_integer
from tests.arithmetic.nearest_float import nearest_float

FORMS = [FLOAT32, BFLOAT16, FLOAT16, FLOAT64]


@given(
    st.integers(-(1 << 140), 1 << 140),
    st.integers(-320, 140),
    st.sampled_from(FORMS),
    st.one_of(st.just(1), st.integers(1, 1 << 40)),
)
def test_every_quotient_rounds_to_the_nearest_float(value, exponent, form, denominator):
    exact = Fraction(value) * Fraction(2) ** exponent / denominator
    assert round_integer(value, exponent, form, denominator) == nearest_float(exact, form)


@given(st.integers(0, 0x7F7FFFFE), st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]), st.integers(-1, 1), st.booleans())
def test_ties_go_to_even_and_their_neighbours_do_not(bits, form, nudge, negative):
    bits %= form.infinity_bits
    field = max(bits >> form.fraction_bits, 1)
    significand = bits - ((field - 1) << form.fraction_bits)
    # The middle between two neighbours, and the numbers 2^-60 of a step beside it.
    middle = ((2 * significand + 1) << 60) + nudge
    exponent = form.lowest_exponent + field - 1 - 61
    expected = bits + (nudge > 0 or (nudge == 0 and bits % 2))
    sign = form.sign_bit if negative else 0
    assert round_integer(-middle if negative else middle, exponent, form) == sign | expected


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_edges_of_a_format(form):
    largest = (1 << form.significand_bits) - 1
    place = form.top_exponent - form.significand_bits
    assert round_integer(largest, place, form) == form.infinity_bits - 1
    assert round_integer(4 * largest + 1, place - 2, form) == form.infinity_bits - 1
    assert round_integer(2 * largest + 1, place - 1, form) == form.infinity_bits
    assert round_integer(1, form.lowest_exponent, form) == 1
    assert round_integer(1, form.lowest_exponent - 1, form) == 0
    assert round_integer(-1, form.lowest_exponent - 1, form) == form.sign_bit
    assert round_integer((1 << 80) + 1, form.lowest_exponent - 81, form) == 1
    assert round_integer(0, 0, form) == 0


def test_a_denominator_below_one_is_refused():
    with pytest.raises(ValueError, match="denominator is 0"):
        round_integer(1, 0, FLOAT32, 0)
