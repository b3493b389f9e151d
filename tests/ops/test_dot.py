"""Means, inner products, sums of squares and batched products against Python fractions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.kernels.cpu.binned_sum import sum_rows
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.dot import det_dot, det_mean, det_sum_of_squares, dot_digits, sum_of_squares_digits
from det_lightning.ops.matmul import det_matmul
from det_lightning.ops.reduction import det_sum_partial
from tests.ops.exact_oracle import (
    any_patterns,
    cancelling_pair,
    exact_gemm,
    float32,
    from_patterns,
    product,
    rounded,
    wide_values,
)
from tests.same_bits import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
patterns = st.integers(0, 2**32 - 1)


def exact_dot(a, b, dtype=torch.float32, denominator=1):
    terms = [product(p, q) for p, q in zip(a.double().tolist(), b.double().tolist(), strict=True)]
    return from_patterns([rounded(terms, dtype, denominator)], [], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2), (1, 2), None])
def test_the_mean_divides_the_exact_sum_by_the_exact_count(dim, dtype):
    x = wide_values(1, 3, 7, 5)
    dims = [0, 1, 2] if dim is None else [d % 3 for d in ([dim] if isinstance(dim, int) else dim)]
    kept = [d for d in range(3) if d not in dims]
    rows = x.permute(*kept, *dims).reshape(torch.Size([x.shape[d] for d in kept]).numel(), -1)
    ones = torch.ones(rows.shape[1])
    expected = torch.stack([exact_dot(row, ones, dtype, len(row)) for row in rows])
    assert_same_bits(det_mean(x, dim, dtype=dtype).view(-1), expected)
    assert det_mean(x, dim, True).shape == x.mean(dims, True).shape


def test_the_mean_of_nothing_is_the_canonical_nan_and_a_sum_of_nothing_is_zero():
    assert_same_bits(det_mean(torch.zeros(0, 3), 0), torch.full((3,), float("nan")))
    assert_same_bits(det_sum_of_squares(torch.zeros(0, 3), 0), torch.zeros(3))
    assert_same_bits(det_dot(torch.zeros(3, 0), torch.zeros(0)), torch.zeros(3))
    assert_same_bits(det_matmul(torch.zeros(2, 3, 0), torch.zeros(0, 4)), torch.zeros(2, 3, 4))
    assert det_matmul(torch.zeros(0, 3, 2), torch.zeros(0, 2, 4)).shape == (0, 3, 4)


@given(st.lists(st.tuples(patterns, patterns), min_size=1, max_size=30), st.sampled_from(DTYPES))
def test_dot_of_any_patterns(pairs, dtype):
    a, b = float32(p for p, _ in pairs), float32(q for _, q in pairs)
    assert_same_bits(det_dot(a, b, dtype=dtype), exact_dot(a, b, dtype))
    assert_same_bits(det_sum_of_squares(a, dtype=dtype), exact_dot(a, a, dtype))


@given(st.integers(0, 2**32), st.integers(1, 1100))
def test_dot_of_numbers_near_one_which_float64_alone_may_sum(seed, terms):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(terms, generator=generator) + 0.5 for _ in range(2))
    assert_same_bits(det_dot(a, b), exact_dot(a, b))
    assert_same_bits(det_mean(a), exact_dot(a, torch.ones(terms), denominator=terms))


@pytest.mark.parametrize("terms", [1, 511, 512, 513, 1025, 40_000])
@pytest.mark.parametrize("spread", [0.0, 2.0, 12.0, 40.0])
def test_sums_of_rows_agree_with_sums_term_by_term(terms, spread):
    x, w = wide_values(1, 2, terms, spread=spread), wide_values(2, 2, terms, spread=spread)
    x[:, : terms // 2].clamp_(-1e30, 1e30)
    ones = torch.ones(1, terms)
    assert torch.equal(sum_rows("sum", x), det_sum_partial(x.unsqueeze(-1).expand(2, terms, 2), 1)[:, 0])
    assert torch.equal(sum_rows("products", x, ones.expand(2, terms).contiguous()), sum_rows("sum", x))
    assert torch.equal(sum_rows("products", x, x), sum_rows("squares", x))
    if terms <= 1025:
        exact = torch.stack([exact_dot(p, q) for p, q in zip(x, w, strict=True)])
        assert_same_bits(det_finalize(sum_rows("products", x, w)), exact)


def test_terms_that_cancel_leave_what_float64_would_lose():
    x, w = cancelling_pair(1, 600)
    assert_same_bits(det_dot(x[0], w[0]), exact_dot(x[0], w[0]))
    assert float((x.double() * w.double()).sum()) != float(exact_dot(x[0], w[0]))


def test_order_of_the_terms_does_not_matter_but_it_does_to_torch():
    x, w = wide_values(1, 5000, spread=3), wide_values(2, 5000, spread=3)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dot_digits(x, w), dot_digits(x[order], w[order]))
    assert torch.equal(sum_of_squares_digits(x), sum_of_squares_digits(x[order]))
    assert not torch.equal(torch.dot(x, w), torch.dot(x[order], w[order]))


def test_any_dimension_of_any_strides():
    x = wide_values(1, 4, 6, 5).transpose(0, 2)
    for dim in (0, 1, 2, (0, 2), (1, 2)):
        dims = [dim] if isinstance(dim, int) else list(dim)
        moved = x.movedim(dims, list(range(3 - len(dims), 3))).flatten(3 - len(dims))
        expected = torch.stack([exact_dot(row, row) for row in moved.reshape(-1, moved.shape[-1])])
        assert_same_bits(det_sum_of_squares(x, dim).reshape(-1), expected)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 5), (5, 3)),
        ((2, 4, 5), (5, 3)),
        ((2, 1, 4, 5), (3, 5, 2)),
        ((4, 5), (2, 5, 3)),
        ((5,), (5, 3)),
        ((4, 5), (5,)),
        ((5,), (5,)),
        ((2, 4, 5), (5,)),
        ((5,), (2, 5, 3)),
        ((1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_has_the_shapes_of_torch_and_exact_elements(left, right, dtype):
    a, b = wide_values(1, *left), wide_values(2, *right)
    out = det_matmul(a, b, dtype=dtype)
    shape = torch.matmul(a, b).shape
    assert out.shape == shape
    p, q = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    sizes = torch.broadcast_shapes(p.shape[:-2], q.shape[:-2])
    p, q = p.expand(*sizes, *p.shape[-2:]), q.expand(*sizes, *q.shape[-2:])
    batches = zip(p.reshape(-1, *p.shape[-2:]), q.reshape(-1, *q.shape[-2:]), strict=True)
    expected = torch.stack([exact_gemm(x, y.t(), dtype=dtype) for x, y in batches])
    assert_same_bits(out, expected.view(shape))


def test_transposed_operands_of_a_batch():
    a, b = wide_values(1, 3, 5, 4).transpose(1, 2), wide_values(2, 3, 6, 5).transpose(1, 2)
    assert_same_bits(det_matmul(a, b), det_matmul(a.contiguous(), b.contiguous()))


def test_special_values_of_a_dot():
    a, b = any_patterns(3, 64, 40), any_patterns(4, 64, 40)
    expected = torch.stack([exact_dot(p, q) for p, q in zip(a, b, strict=True)])
    assert_same_bits(det_dot(a, b), expected)


def test_wrong_arguments_are_refused_with_a_reason():
    x = torch.zeros(2, 3)
    for make, message in [
        (lambda: det_dot(x, x[:, :2]), "same dimension"),
        (lambda: det_dot(x, torch.zeros(3, 3)), "broadcast"),
        (lambda: det_mean(x, 2), "dim"),
        (lambda: det_mean(x.double()), "float64"),
        (lambda: det_sum_of_squares(x, (0, 0)), "once"),
        (lambda: det_matmul(x, x), "last dimension"),
        (lambda: det_matmul(torch.zeros(2, 2, 3), torch.zeros(3, 3, 2)), "broadcast"),
        (lambda: det_matmul(torch.tensor(1.0), x), "a is"),
    ]:
        with pytest.raises(InputError, match=message):
            make()
