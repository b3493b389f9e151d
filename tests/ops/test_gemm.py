"""det_gemm against Python fractions: values, special values, shapes, dtypes, and the controls that must fail."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.ops.gemm import ENGINES, det_gemm
from tests.ops.exact_oracle import (
    INF,
    LARGEST,
    NAN,
    NEGATIVE_INF,
    SMALLEST,
    any_patterns,
    cancelling_pair,
    exact_gemm,
    float32,
    wide_values,
)
from tests.same_bits import assert_same_bits

every_engine = pytest.mark.parametrize("engine", ENGINES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# name: (row of x, row of w, bias or None, the correctly rounded float32 pattern)
SPECIAL_VALUES = {
    "empty sum": ([], [], None, 0x00000000),
    "empty sum with bias": ([], [], -3.0, 0xC0400000),
    "empty sum with a negative zero bias": ([], [], -0.0, 0x00000000),
    "negative zeros add to positive zero": ([-0.0, -1.0], [1.0, 0.0], -0.0, 0x00000000),
    "total cancellation is positive zero": ([LARGEST, -LARGEST], [LARGEST, LARGEST], None, 0x00000000),
    "nan": ([NAN, 1.0], [1.0, 1.0], None, 0x7FC00000),
    "nan times zero": ([NAN], [0.0], None, 0x7FC00000),
    "infinity": ([INF, 1.0], [2.0, -5.0], None, 0x7F800000),
    "negative infinity": ([INF, 1.0], [-SMALLEST, -5.0], None, 0xFF800000),
    "infinity times zero": ([INF], [0.0], None, 0x7FC00000),
    "infinity times negative zero": ([NEGATIVE_INF], [-0.0], None, 0x7FC00000),
    "both infinities": ([INF, INF], [1.0, -1.0], None, 0x7FC00000),
    "infinity against a bias of the other sign": ([INF], [1.0], NEGATIVE_INF, 0x7FC00000),
    "infinite bias": ([1.0], [1.0], NEGATIVE_INF, 0xFF800000),
    "nan bias": ([1.0], [1.0], NAN, 0x7FC00000),
    "infinity beside an overflowing sum": ([INF, LARGEST], [1.0, -LARGEST], None, 0x7F800000),
    "overflow": ([LARGEST], [LARGEST], None, 0x7F800000),
    "negative overflow": ([LARGEST], [-LARGEST], None, 0xFF800000),
    "overflow that cancels": ([LARGEST, LARGEST, 1.0], [LARGEST, -LARGEST, 3.0], None, 0x40400000),
    "half an ulp above the largest is infinity": ([LARGEST, 1.0], [1.0, 2.0**103], None, 0x7F800000),
    "just below half an ulp above the largest": (
        [LARGEST, 1.0, -SMALLEST],
        [1.0, 2.0**103, SMALLEST],
        None,
        0x7F7FFFFF,
    ),
    "smallest product rounds to zero": ([SMALLEST], [SMALLEST], None, 0x00000000),
    "smallest negative product rounds to negative zero": ([SMALLEST], [-SMALLEST], None, 0x80000000),
    "half the smallest subnormal is a tie to zero": ([SMALLEST], [0.5], None, 0x00000000),
    "just above half the smallest subnormal": ([SMALLEST, SMALLEST], [0.5, SMALLEST], None, 0x00000001),
    "subnormal result": ([2.0**-100, SMALLEST], [3 * 2.0**-48, 1.0], None, 0x00000007),
    "subnormal operands": ([5 * SMALLEST], [2.0**100], None, 0x28200000),
    "largest subnormal plus one place is normal": ([2.0**-126 - SMALLEST, SMALLEST], [1.0, 1.0], None, 0x00800000),
    "tie to even stays": ([1.0, 2.0**-24], [1.0, 1.0], None, 0x3F800000),
    "tie to even steps": ([1.0 + 2.0**-23, 2.0**-24], [1.0, 1.0], None, 0x3F800002),
    "a tie broken 273 places below": ([1.0, 2.0**-24, SMALLEST], [1.0, 1.0, 2.0**-148], None, 0x3F800001),
    "a tie broken downwards": ([1.0 + 2.0**-23, 2.0**-24, SMALLEST], [1.0, 1.0, -SMALLEST], None, 0x3F800001),
    "a tie broken by the bias": ([1.0], [1.0], 2.0**-24 + 2.0**-47, 0x3F800001),
    "a tie broken by a bias far below": ([1.0, 2.0**-24], [1.0, 1.0], SMALLEST, 0x3F800001),
    "a bias far above": ([2.0**-70], [2.0**-70], 2.0**100, 0x71800000),
    "a bias that cancels": ([3.0], [5.0], -15.0, 0x00000000),
    "the whole range in one sum": ([LARGEST, SMALLEST, -LARGEST], [LARGEST, SMALLEST, LARGEST], None, 0x00000000),
}


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64).to(torch.float32).reshape(1, len(values))


@every_engine
@pytest.mark.parametrize(("x", "w", "bias", "expected"), SPECIAL_VALUES.values(), ids=SPECIAL_VALUES.keys())
def test_special_values(x, w, bias, expected, engine):
    b = None if bias is None else torch.tensor([bias], dtype=torch.float64).to(torch.float32)
    result = det_gemm(row(x), row(w), b, engine=engine)
    assert_same_bits(result, float32([expected]).view(1, 1))
    assert not result.isnan().any() or result.view(torch.int32).item() == 0x7FC00000


@every_engine
def test_nan_payloads_leave_as_the_canonical_nan(engine):
    payloads = float32([0x7F800001, 0xFFC12345, 0xFFFFFFFF, 0x7FC00000]).view(4, 1)
    result = det_gemm(payloads, torch.ones(1, 1), engine=engine)
    assert result.view(torch.int32).flatten().tolist() == [0x7FC00000] * 4


@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(1, 4)),
    source=st.sampled_from(["any", "wide", "narrow"]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
)
def test_every_engine_gives_the_nearest_float_of_the_exact_sum(seed, shape, source, dtype, biased):
    m, k, n = shape
    make = {
        "any": any_patterns,
        "wide": lambda s, *size: wide_values(s, *size, spread=25.0),
        "narrow": lambda s, *size: wide_values(s, *size, spread=1.0),
    }[source]
    x, w, bias = make(seed, m, k), make(seed + 1, n, k), make(seed + 2, n) if biased else None
    expected = exact_gemm(x, w, bias, dtype)
    for engine in ENGINES:
        assert_same_bits(det_gemm(x, w, bias, dtype=dtype, engine=engine), expected)


@every_engine
@pytest.mark.parametrize("input_dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", DTYPES)
def test_half_formats_enter_exactly_and_leave_with_one_rounding(input_dtype, output_dtype, engine):
    x, w = wide_values(1, 5, 40, spread=3.0).to(input_dtype), wide_values(2, 6, 40, spread=3.0).to(input_dtype)
    bias = wide_values(3, 6).to(input_dtype)
    result = det_gemm(x, w, bias, dtype=output_dtype, engine=engine)
    assert_same_bits(result, exact_gemm(x, w, bias, output_dtype))


def test_the_default_output_is_float32_also_for_bfloat16_inputs():
    assert (
        det_gemm(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)).dtype is torch.float32
    )


@every_engine
@pytest.mark.parametrize("k", [0, 1, 16, 17, 2047, 2048, 2049])
def test_any_number_of_terms(k, engine):
    x, w, bias = wide_values(k, 3, k), wide_values(k + 1, 2, k), torch.tensor([0.5, -0.0])
    assert_same_bits(det_gemm(x, w, bias, engine=engine), exact_gemm(x, w, bias))


@every_engine
def test_seventy_thousand_terms(engine):
    x, w = torch.full((2, 70000), 3.0), torch.full((1, 70000), 2.0**-20)
    x[0, ::2] = -3.0
    x[0, 12345], x[1, 69999] = 2.0**60, -(2.0**100)
    assert_same_bits(
        det_gemm(x, w, torch.tensor([2.0**-30]), engine=engine), exact_gemm(x, w, torch.tensor([2.0**-30]))
    )


@every_engine
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 2), (2, 3, 0), (0, 0, 0), (2, 0, 3), (0, 5, 0)])
def test_empty_sizes(m, k, n, engine):
    result = det_gemm(torch.ones(m, k), torch.ones(n, k), engine=engine)
    assert_same_bits(result, torch.zeros(m, n))


@every_engine
def test_sums_whose_large_products_cancel(engine):
    for seed, terms in enumerate([4, 10, 100, 1000]):
        x, w = cancelling_pair(seed, terms)
        assert_same_bits(det_gemm(x, w, engine=engine), exact_gemm(x, w))


@pytest.mark.parametrize("impostor", [torch.float32, torch.float64])
def test_sums_in_float32_and_in_float64_fail_the_same_check(impostor):
    x, w = cancelling_pair(3, 100)
    with pytest.raises(AssertionError, match="ulps apart"):
        assert_same_bits((x.to(impostor) @ w.to(impostor).T).to(torch.float32), exact_gemm(x, w))


def test_rounding_twice_fails_the_same_check():
    # 1 + 2^-8 + 2^-30 lies above a tie of bfloat16; float32 in between rounds it onto the tie.
    x, w = row([1.0, 2.0**-8, 2.0**-30]), row([1.0, 1.0, 1.0])
    expected = exact_gemm(x, w, dtype=torch.bfloat16)
    assert_same_bits(det_gemm(x, w, dtype=torch.bfloat16), expected)
    with pytest.raises(AssertionError):
        assert_same_bits(det_gemm(x, w).to(torch.bfloat16), expected)


MISUSES = {
    "x is a list": (lambda x, w: det_gemm([[1.0]], w), "det_gemm: x is a list, not a tensor"),
    "w is float64": (lambda x, w: det_gemm(x, w.double()), r"w has dtype float64; allowed: float32, bfloat16, float16"),
    "x is integer": (lambda x, w: det_gemm(x.int(), w), "x has dtype int32"),
    "x has three dimensions": (lambda x, w: det_gemm(x[None], w), r"x is \[1, 2, 3\] and w is \[4, 3\]"),
    "terms differ": (lambda x, w: det_gemm(x, w[:, :2]), r"w is \[4, 2\]; they must be \[M, K\] and \[N, K\]"),
    "bias too long": (lambda x, w: det_gemm(x, w, torch.ones(5)), r"bias is \[5\] and w is \[4, 3\].*N = 4"),
    "bias is a number": (lambda x, w: det_gemm(x, w, 1.0), "bias is a float, not a tensor"),
    "output float64": (lambda x, w: det_gemm(x, w, dtype=torch.float64), "dtype is torch.float64; allowed"),
    "unknown engine": (lambda x, w: det_gemm(x, w, engine="fast"), "engine is 'fast'; allowed: auto, int8, float64"),
    "another device": (lambda x, w: det_gemm(x.to("meta"), w), r"x is on device meta; there are kernels for cpu"),
    "sparse": (lambda x, w: det_gemm(x.to_sparse(), w), "layout torch.sparse_coo; only strided"),
}


@pytest.mark.parametrize(("call", "message"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_refused_with_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises(InputError, match=message):
        call(torch.ones(2, 3), torch.ones(4, 3))
