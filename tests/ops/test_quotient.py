"""Sums divided by numbers that are no small integers: the definition's bits, also where the fast way cannot decide."""

from fractions import Fraction

import pytest
import torch

from det_lightning.arithmetic.formats import DIGITS, NB
from det_lightning.errors import InputError
from det_lightning.ops.digits import det_finalize, zero_digits
from det_lightning.ops.dot import dot_digits
from det_lightning.ops.quotient import det_quotient
from det_lightning.ops.reduction import det_sum_partial
from tests.ops.exact_oracle import INF, NAN, any_patterns, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits

DENOMINATORS = [
    Fraction(3 * 2**40 + 1),
    Fraction(0.3) * 7 + Fraction(0.7) * 5,
    Fraction(10**25 + 1, 2**60),
    Fraction(2) ** -100,
    Fraction(5) * Fraction(2) ** 90,
    Fraction(7),
]


def expected(values, denominator, dtype):
    return from_patterns([rounded([v], dtype, denominator) for v in values], (len(values),), dtype)


@pytest.mark.parametrize("denominator", DENOMINATORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_quotient_is_rounded_once(denominator, dtype):
    a, b = wide_values(1, 60, 3, spread=9), wide_values(2, 60, 3, spread=9)
    digits = dot_digits(a, b)
    exact = [
        sum(Fraction(x) * Fraction(y) for x, y in zip(*pair, strict=True))
        for pair in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert_same_bits(det_quotient(digits, denominator, dtype=dtype), expected(exact, denominator, dtype))
    assert_same_bits(det_quotient(-digits, denominator, dtype=dtype), expected([-e for e in exact], denominator, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_and_what_is_next_to_them(dtype):
    """Quotients halfway between two results, and off by less than float64 can tell."""
    odd, bits = 2**35 + 1, 24 if dtype is torch.float32 else 8
    values = []
    for significand in (2**bits + 1, 2**bits + 3, 2 ** (bits + 1) - 1):
        for nudge in (-1, 0, 1):
            values.append(Fraction(significand) * odd * 2**60 + nudge)
    digits = zero_digits((len(values),))
    for place, value in enumerate(values):
        for j in range(DIGITS):
            digits[place, j] = (int(value) << 298 >> (32 * j)) & 0xFFFFFFFF
    assert_same_bits(det_quotient(digits, odd, dtype=dtype), expected(values, odd, dtype))
    double = torch.tensor([float(v / odd) for v in values], dtype=torch.float64).to(dtype)
    assert (double != det_quotient(digits, odd, dtype=dtype)).any(), "float64 alone decides wrongly here"


def test_small_results_overflow_and_special_values():
    x = torch.cat([any_patterns(5, 40), torch.tensor([NAN, INF, -INF, 0.0, -0.0, 2.0**-149, -(2.0**-149), 3.4e38])])
    digits = det_sum_partial(x.unsqueeze(1), dim=1)
    for denominator in (Fraction(2**33 + 1, 2**31), Fraction(2**33 + 1), Fraction(2**33 + 1, 2**70)):
        terms = x.tolist()
        patterns = [rounded([v], torch.float32, denominator) for v in terms]
        assert_same_bits(det_quotient(digits, denominator), from_patterns(patterns, x.shape, torch.float32))


def test_a_small_integer_is_the_ordinary_rounding_and_nothing_is_divided_by_zero_quietly():
    digits = det_sum_partial(wide_values(3, 5, 4), dim=1)
    assert_same_bits(det_quotient(digits, 12), det_finalize(digits, denominator=12))
    assert_same_bits(det_quotient(zero_digits((2,)), 0), torch.tensor([NAN, NAN]))
    assert_same_bits(det_quotient(zero_digits((0,)), 2**40), torch.zeros(0))
    for denominator in (-1, Fraction(1, 3)):
        with pytest.raises(InputError, match="times a power of two"):
            det_quotient(torch.zeros(NB, dtype=torch.int64), denominator)
