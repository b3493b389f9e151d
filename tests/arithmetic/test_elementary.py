"""exp and log as defined on integers, against mpmath at 200 bits and exact rounding of its values."""

import random
import struct
from fractions import Fraction

import mpmath
import pytest

from det_lightning.arithmetic import elementary
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, decode
from tests.arithmetic.nearest_float import nearest_float

NAN, INF, NEGATIVE_INF, ONE = 0x7FC00000, 0x7F800000, 0xFF800000, 0x3F800000


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def by_mpmath(function, bits: int, form=FLOAT32) -> int:
    significand, exponent = decode(bits, form)
    with mpmath.workprec(200):
        sign, man, exp, _ = function(mpmath.ldexp(significand, exponent))._mpf_
    return nearest_float((-1) ** sign * Fraction(int(man)) * Fraction(2) ** exp, form)


def test_exp_is_the_nearest_float_on_samples():
    rng = random.Random(1)
    for value in [rng.uniform(-104, 89) for _ in range(150)] + [rng.gauss(0, 1e-4) for _ in range(50)]:
        assert elementary.exp(bits_of(value)) == by_mpmath(mpmath.exp, bits_of(value))


def test_log_is_the_nearest_float_on_samples():
    rng = random.Random(2)
    for bits in [rng.randrange(1, INF) for _ in range(150)] + [
        ONE + rng.randrange(-900, 900) or ONE for _ in range(50)
    ]:
        if bits != ONE:
            assert elementary.log(bits) == by_mpmath(mpmath.log, bits)


@pytest.mark.parametrize("form", [BFLOAT16, FLOAT16], ids=lambda form: form.name)
def test_narrow_formats_round_once_too(form):
    rng = random.Random(3)
    one = nearest_float(Fraction(1), form)
    for _ in range(60):
        bits = rng.randrange(1, form.infinity_bits)
        if bits != one:
            assert elementary.log(bits, form) == by_mpmath(mpmath.log, bits, form)
    for _ in range(60):
        value = rng.uniform(-9, 9)
        bits = nearest_float(Fraction(value), form)
        assert elementary.exp(bits, form) == by_mpmath(mpmath.exp, bits, form)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, ONE),
        (0x80000000, ONE),
        (1, ONE),
        (INF, INF),
        (NEGATIVE_INF, 0),
        (0xFF800001, NAN),
        (bits_of(88.72283), 0x7F7FFF84),
        (bits_of(88.72284), INF),
        (bits_of(-103.97207), 1),
        (bits_of(-103.97209), 0),
        (0x7F7FFFFF, INF),
        (0xFF7FFFFF, 0),
    ],
)
def test_exp_of_special_values(bits, expected):
    assert elementary.exp(bits) == expected


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, NEGATIVE_INF),
        (0x80000000, NEGATIVE_INF),
        (ONE, 0),
        (INF, INF),
        (NEGATIVE_INF, NAN),
        (0xBF800000, NAN),
        (0x80000001, NAN),
        (NAN, NAN),
        (1, bits_of(-103.27893)),
    ],
)
def test_log_of_special_values(bits, expected):
    assert elementary.log(bits) == expected
