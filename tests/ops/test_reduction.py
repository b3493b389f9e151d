"""det_sum and sums of squares against Python fractions, and what may not change a bit of them."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.ops.digits import det_combine, det_finalize, digits_value, zero_digits
from det_lightning.ops.reduction import add_sum_digits, det_sum, det_sum_partial, sum_of_squares_partial
from tests.ops.exact_oracle import (
    INF,
    LARGEST,
    NAN,
    NEGATIVE_INF,
    SMALLEST,
    any_patterns,
    float32,
    from_patterns,
    rounded,
    wide_values,
)
from tests.same_bits import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SPECIAL_VALUES = {
    "empty": ([], 0x00000000),
    "negative zeros": ([-0.0, -0.0], 0x00000000),
    "cancellation": ([3.0, -3.0], 0x00000000),
    "nan": ([NAN, 1.0], 0x7FC00000),
    "infinity": ([INF, -LARGEST], 0x7F800000),
    "negative infinity": ([NEGATIVE_INF, LARGEST], 0xFF800000),
    "both infinities": ([INF, NEGATIVE_INF], 0x7FC00000),
    "overflow": ([LARGEST, LARGEST], 0x7F800000),
    "overflow that comes back": ([LARGEST, LARGEST, -LARGEST], 0x7F7FFFFF),
    "subnormals": ([SMALLEST, SMALLEST, -5 * SMALLEST], 0x80000003),
    "the whole range": ([LARGEST, SMALLEST, -LARGEST], 0x00000001),
    "tie to even": ([2.0**24, 1.0], 0x4B800000),
    "a tie broken far below": ([2.0**24, 1.0, SMALLEST], 0x4B800001),
}


@pytest.mark.parametrize(("values", "expected"), SPECIAL_VALUES.values(), ids=SPECIAL_VALUES.keys())
def test_special_values(values, expected):
    x = torch.tensor(values, dtype=torch.float64).to(torch.float32)
    assert_same_bits(det_sum(x), float32([expected]).view(()))
    assert det_sum(x).view(torch.int32).item() & 0xFFFFFFFF == expected


@given(
    seed=st.integers(0, 2**32),
    shape=st.lists(st.integers(0, 5), max_size=4),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    input_dtype=st.sampled_from(DTYPES),
    keepdim=st.booleans(),
)
def test_sums_over_any_dimensions_are_the_nearest_float(seed, shape, data, dtype, input_dtype, keepdim):
    x = (any_patterns if seed % 2 else wide_values)(seed, *shape).to(input_dtype)
    dim = data.draw(st.one_of(st.none(), st.sets(st.integers(0, len(shape) - 1)).map(tuple) if shape else st.just(())))
    reduced = set(range(x.dim())) if dim is None else set(dim)
    kept = [d for d in range(x.dim()) if d not in reduced]
    patterns = []
    for index in itertools.product(*(range(x.shape[d]) for d in kept)):
        place = [slice(None)] * x.dim()
        for d, i in zip(kept, index, strict=True):
            place[d] = i
        patterns.append(rounded(x[tuple(place)].double().flatten().tolist(), dtype))
    full = [1 if d in reduced else x.shape[d] for d in range(x.dim())]
    expected = from_patterns(patterns, full if keepdim else [x.shape[d] for d in kept], dtype)
    assert_same_bits(det_sum(x, dim, keepdim, dtype=dtype), expected)


def test_the_output_dtype_is_that_of_the_input_unless_asked():
    assert det_sum(torch.ones(3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert det_sum(torch.ones(3, dtype=torch.bfloat16), dtype=torch.float32).dtype is torch.float32


@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 1)])
def test_long_sums_do_not_depend_on_order_threads_or_strides(dim):
    x = wide_values(1, 3, 50001)
    expected = det_sum(x, dim)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_same_bits(det_sum(x, dim), expected)
            assert_same_bits(det_sum(x.T.contiguous().T, dim), expected)
    finally:
        torch.set_num_threads(before)
    flipped = det_sum(x.flip(0, 1), dim)
    assert_same_bits(flipped.flip(0) if expected.dim() else flipped, expected)


def test_long_sums_are_the_nearest_float():
    x = wide_values(2, 40000)
    assert_same_bits(det_sum(x), from_patterns([rounded(x.double().tolist(), torch.float32)], [], torch.float32))


def test_partial_sums_of_any_split_compose():
    x = wide_values(3, 5, 999)
    parts = [det_sum_partial(part, 1) for part in x.split([0, 1, 500, 498], dim=1)]
    assert_same_bits(det_finalize(det_combine(parts)), det_sum(x, 1))
    digits = zero_digits((5,))
    for part in x.split(100, dim=1):
        add_sum_digits(digits, part, 1)
    assert_same_bits(det_finalize(digits), det_sum(x, 1))


def test_a_mean_is_one_rounding_of_the_exact_quotient():
    x = wide_values(4, 7)
    mean = det_finalize(det_sum_partial(x), denominator=7)
    assert_same_bits(mean, from_patterns([rounded(x.double().tolist(), torch.float32, 7)], [], torch.float32))


@pytest.mark.parametrize("size", [0, 1, 17, 16384, 16385, 60000])
def test_sums_of_squares_are_exact(size):
    x = wide_values(size, size)
    exact = sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0))
    assert digits_value(sum_of_squares_partial(x)) == exact
    assert digits_value(sum_of_squares_partial(x.view(1, size).T)) == exact


@pytest.mark.parametrize(
    ("value", "expected"), [(INF, INF), (NEGATIVE_INF, INF), (NAN, NAN), (LARGEST, None), (SMALLEST, None)]
)
def test_special_values_in_sums_of_squares(value, expected):
    result = digits_value(sum_of_squares_partial(torch.tensor([1.0, value])))
    assert str(result) == str(Fraction(value) ** 2 + 1 if expected is None else expected)


def test_plain_float32_depends_on_the_order_and_misses_the_nearest_float():
    x = wide_values(5, 5000)
    expected = det_sum(x)
    with pytest.raises(AssertionError, match="ulps apart"):
        for order in (slice(None), torch.randperm(5000, generator=torch.Generator().manual_seed(1)), x.argsort()):
            assert_same_bits(x[order].sum(), expected)


def test_a_float64_sum_misses_the_nearest_float():
    x = torch.tensor([2.0**100, 1.0, 2.0**-40, -(2.0**100)])
    with pytest.raises(AssertionError, match="ulps apart"):
        assert_same_bits(x.double().sum().float(), det_sum(x))


MISUSES = {
    "float64": (lambda x: det_sum(x.double()), "det_sum: x has dtype float64; allowed"),
    "a list": (lambda x: det_sum([1.0]), "x is a list, not a tensor"),
    "dimension": (lambda x: det_sum(x, 2), r"dim is 2; x is \[2, 3\], so each must be in \[-2, 2\)"),
    "twice": (lambda x: det_sum(x, (0, -2)), "each dimension may be named once"),
    "output": (lambda x: det_sum(x, dtype=torch.float64), "dtype is torch.float64"),
    "digits": (lambda x: add_sum_digits(zero_digits((2,)), x, 0), r"digits is \[2, 21\]; .* it must be \[3, 21\]"),
    "squares": (lambda x: sum_of_squares_partial(x.long()), "x has dtype int64"),
}


@pytest.mark.parametrize(("call", "message"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_refused_with_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises(InputError, match=message):
        call(torch.ones(2, 3))
