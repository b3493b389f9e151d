"""The definition of an exact sum, against Python fractions."""

import random
import struct
from fractions import Fraction

import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB
from det_lightning.arithmetic.long_accumulator import (
    add_product,
    add_term,
    digits_of,
    finalize,
    fraction_of,
    normalise,
    value_of,
    zero_state,
)
from tests.arithmetic.nearest_float import nearest_float

NAN, INF, NEGATIVE_INF, ZERO, ONE, NEGATIVE_ONE = 0x7FC00000, 0x7F800000, 0xFF800000, 0, 0x3F800000, 0xBF800000
SIGNALING_NAN = 0xFF800001


def finite_patterns(rng: random.Random, count: int) -> list[int]:
    return [b for b in (rng.getrandbits(32) for _ in range(count)) if b >> 23 & 255 != 255]


def as_fraction(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def test_sums_of_products_and_terms_are_exact_and_round_once():
    rng = random.Random(1)
    for _ in range(40):
        state, exact = zero_state(), Fraction(0)
        patterns = finite_patterns(rng, 60)
        for a, b in zip(patterns[::2], patterns[1::2], strict=False):
            add_product(state, a, b)
            add_term(state, a)
            exact += as_fraction(a) * as_fraction(b) + as_fraction(a)
        assert fraction_of(state) == exact
        denominator = rng.randrange(1, 1 << 20)
        for form in (FLOAT32, BFLOAT16):
            assert finalize(state, form) == nearest_float(exact, form)
            assert finalize(state, form, denominator) == nearest_float(exact / denominator, form)


def test_the_smallest_and_the_largest_products_have_their_digits():
    state = zero_state()
    add_product(state, 1, 1)
    assert state == [1] + [0] * (NB - 1)
    state = zero_state()
    add_product(state, 0x7F7FFFFF, 0x7F7FFFFF)
    assert fraction_of(state) == ((2**24 - 1) * 2**104) ** 2
    for _ in range(5):
        add_product(state, 0x7F7FFFFF, 0xFF7FFFFF)
    assert fraction_of(state) == -4 * ((2**24 - 1) * 2**104) ** 2


def test_normalising_keeps_the_value_and_is_idempotent():
    rng = random.Random(2)
    for _ in range(100):
        state = [rng.randrange(-(1 << 62), 1 << 62) for _ in range(18)] + [0, 0, 0]
        canonical = normalise(state)
        assert value_of(canonical) == value_of(state)
        assert all(0 <= digit < 1 << 32 for digit in canonical[:17])
        assert normalise(canonical) == canonical == [*digits_of(value_of(state)), 0, 0, 0]


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ([], 0),
        ([(ZERO, NEGATIVE_ONE)], 0),
        ([(NAN, ZERO)], NAN),
        ([(SIGNALING_NAN, ONE)], NAN),
        ([(INF, ZERO)], NAN),
        ([(NEGATIVE_INF, 0x80000000)], NAN),
        ([(INF, ONE)], INF),
        ([(INF, NEGATIVE_ONE)], NEGATIVE_INF),
        ([(NEGATIVE_INF, NEGATIVE_INF)], INF),
        ([(INF, 1)], INF),
        ([(INF, ONE), (INF, NEGATIVE_ONE)], NAN),
        ([(INF, ONE), (0x7F7FFFFF, 0xFF7FFFFF)], INF),
        ([(0x7F7FFFFF, 0x7F7FFFFF)], INF),
        ([(0x7F7FFFFF, 0x7F7FFFFF), (0x7F7FFFFF, 0xFF7FFFFF)], 0),
        ([(1, 1)], 0),
        ([(1, 0x80000001)], 0x80000000),
    ],
)
def test_special_products(products, expected):
    state = zero_state()
    for a, b in products:
        add_product(state, a, b)
    assert finalize(state) == expected


def test_a_denominator_of_zero_divides_like_ieee():
    assert finalize(zero_state(), denominator=0) == NAN
    for sign, expected in ((ONE, INF), (NEGATIVE_ONE, NEGATIVE_INF)):
        state = zero_state()
        add_term(state, sign)
        assert finalize(state, denominator=0) == expected
