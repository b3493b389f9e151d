"""The definition of windowed digits, on Python integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.arithmetic.windowed_digits import (
    MAXIMUM_STATES,
    MAXIMUM_WORDS,
    STORED_BITS,
    WORD_BITS,
    grow,
    value_of,
    words_for,
    words_of,
)

integers = st.integers(-(2**600), 2**600)


@given(integers)
def test_words_in_normal_form_stand_for_their_integer(value):
    words = words_of(value, MAXIMUM_WORDS)
    assert value_of(words) == value
    assert all(-(1 << WORD_BITS - 1) <= word < 1 << WORD_BITS - 1 for word in words)


@given(integers)
def test_the_window_for_a_value_holds_it_and_half_its_words_do_not(value):
    count = words_for(0, value.bit_length())
    assert value_of(words_of(value, count)) == value
    if value.bit_length() > WORD_BITS:
        with pytest.raises(OverflowError):
            words_of(value, count // 2)


@given(integers, st.integers(0, 100))
def test_growing_multiplies_by_a_power_of_two(value, lower_by):
    words = words_of(value, MAXIMUM_WORDS)
    assert value_of(grow(words, lower_by, MAXIMUM_WORDS + 4)) == value << lower_by


def test_the_most_states_fit_the_stored_bits_with_their_carry_and_twice_as_many_do_not():
    largest_word, largest_carry = 1 << WORD_BITS - 1, (MAXIMUM_STATES + 1) // 2 + 1
    assert MAXIMUM_STATES * largest_word + largest_carry < 1 << STORED_BITS - 1
    assert 2 * MAXIMUM_STATES * largest_word > 1 << STORED_BITS - 1
