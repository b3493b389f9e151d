"""Sums by index against Python fractions: exact, and blind to the order of the indices."""

from fractions import Fraction
from itertools import pairwise
from itertools import product as places_of
from math import isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.ops.digits import det_finalize, zero_digits
from det_lightning.ops.scatter import (
    add_embedding_digits,
    add_index_digits,
    det_index_add,
    det_scatter_add,
    embedding,
    embedding_gradient,
)
from tests.ops.exact_oracle import INF, NAN, NEGATIVE_INF, any_patterns, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact_term(value: float) -> Fraction | float:
    return Fraction(value) if isfinite(value) else value


def exact_scatter_add(x, dim, index, source, dtype):
    """torch.scatter_add by fractions."""
    terms = {place: [exact_term(x[place].item())] for place in places_of(*map(range, x.shape))}
    for place in places_of(*map(range, index.shape)):
        target = (*place[:dim], int(index[place]), *place[dim + 1 :])
        terms[target].append(exact_term(source[place].item()))
    return from_patterns([rounded(t, dtype) for t in terms.values()], x.shape, dtype)


def expand_index(index, dim, source):
    shape = [-1 if d == dim else 1 for d in range(source.dim())]
    return index.view(shape).expand(source.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_index_add_is_one_exact_sum_an_element(dim, dtype):
    x, n = wide_values(1, 4, 5, 3).to(dtype), 23
    shape = list(x.shape)
    shape[dim] = n
    source = wide_values(2, *shape).to(dtype)
    index = torch.randint(0, x.shape[dim], (n,), generator=torch.Generator().manual_seed(3))
    expected = exact_scatter_add(x, dim % 3, expand_index(index, dim % 3, source), source, dtype)
    assert_same_bits(det_index_add(x, dim, index, source), expected)
    assert_same_bits(det_index_add(x, dim, index.to(torch.int32), source), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_add_is_one_exact_sum_an_element_for_arguments_of_any_size(dim, dtype):
    x, source = wide_values(1, 4, 5, 6), wide_values(2, 9, 9, 9)
    sizes = [3, 4, 5]
    sizes[dim] = 8
    index = torch.randint(0, x.shape[dim], sizes, generator=torch.Generator().manual_seed(dim))
    expected = exact_scatter_add(x, dim, index, source, dtype)
    assert_same_bits(det_scatter_add(x, dim, index, source, dtype=dtype), expected)


def test_every_pattern_of_bits_may_come():
    x, source = any_patterns(5, 6, 8), any_patterns(6, 40, 8)
    index = torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(7))
    expected = exact_scatter_add(x, 0, expand_index(index, 0, source), source, torch.float32)
    assert_same_bits(det_index_add(x, 0, index, source), expected)


@given(st.permutations(range(12)))
def test_order_of_the_indices_does_not_matter(order):
    index, source = torch.tensor([0, 2, 2, 0, 1, 2, 2, 2, 0, 1, 2, 0]), wide_values(8, 12, 3)
    x = wide_values(9, 4, 3)
    assert_same_bits(det_index_add(x, 0, index[order], source[order]), det_index_add(x, 0, index, source))


def test_order_of_the_indices_matters_to_torch():
    index, source = torch.zeros(12, dtype=torch.int64), wide_values(8, 12, 30)
    order = list(range(11, -1, -1))
    plain = [torch.zeros(1, 30).index_add(0, i, s) for i, s in ((index, source), (index[order], source[order]))]
    assert not torch.equal(plain[0], plain[1])


def test_special_values_and_zeros():
    x = torch.tensor([-0.0, -0.0, INF, 1.0, NAN, 0.0])
    index, source = torch.tensor([1, 2, 3, 3, 5]), torch.tensor([-0.0, NEGATIVE_INF, INF, 1.0, -0.0])
    expected = torch.tensor([0.0, 0.0, NAN, INF, NAN, 0.0])
    assert_same_bits(det_index_add(x, 0, index, source), expected)
    assert_same_bits(det_scatter_add(x, 0, index, source), expected)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_the_gradient_of_an_embedding_is_one_exact_sum_a_row(padding_idx):
    weight = wide_values(1, 7, 5).requires_grad_()
    indices = torch.randint(0, 7, (3, 11), generator=torch.Generator().manual_seed(4))
    gradient = wide_values(2, 3, 11, 5)
    out = embedding(indices, weight, padding_idx=padding_idx)
    assert_same_bits(out, weight.detach()[indices])
    out.backward(gradient)
    flat = gradient.view(-1, 5).clone()
    if padding_idx is not None:
        flat[indices.view(-1) == padding_idx % 7] = 0
    expanded = indices.view(-1, 1).expand(-1, 5)
    expected = exact_scatter_add(torch.zeros(7, 5), 0, expanded, flat, torch.float32)
    assert_same_bits(weight.grad, expected)
    digits = zero_digits((7, 5))
    add_embedding_digits(digits, gradient, indices, padding_idx=padding_idx)
    assert_same_bits(det_finalize(digits), expected)


def test_digits_of_parts_of_a_batch_add_up_to_those_of_the_whole():
    gradient, indices = wide_values(2, 30, 5), torch.randint(0, 7, (30,), generator=torch.Generator().manual_seed(4))

    class Sink:
        def __init__(self):
            self.total = zero_digits((7, 5))

        def digits(self, parameter):
            return self.total

    weight, sums = torch.zeros(7, 5, requires_grad=True), []
    for cuts in ([0, 30], [0, 1, 17, 30]):
        sink = Sink()
        for first, last in pairwise(cuts):
            embedding(indices[first:last], weight, sink=sink).backward(gradient[first:last])
        sums.append(det_finalize(sink.total))
    assert weight.grad is None
    assert_same_bits(sums[0], sums[1])
    assert_same_bits(sums[0], embedding_gradient(gradient, indices, 7))


def test_digits_of_any_strides_are_added_in_place():
    store = zero_digits((4, 3, 6))
    digits = store.permute(1, 0, 2, 3)
    index, source = torch.tensor([0, 2, 2]), wide_values(3, 3, 4, 6)
    add_index_digits(digits, index, source)
    add_index_digits(digits, index, source)
    expected = det_index_add(torch.zeros(3, 4, 6), 0, torch.cat([index, index]), torch.cat([source, source]))
    assert_same_bits(det_finalize(digits), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_many_terms_on_one_index(rows):
    source = wide_values(1, 40_000, rows, spread=3)
    index = torch.zeros(40_000, dtype=torch.int64)
    expected = det_index_add(torch.zeros(2, rows), 0, index, source)
    terms = [[exact_term(v) for v in source[:, c].tolist()] for c in range(rows)]
    patterns = [rounded(t, torch.float32) for t in terms] + [0] * rows
    assert_same_bits(expected, from_patterns(patterns, (2, rows), torch.float32))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0,), (3,)])
def test_empty_sizes(shape):
    x, n = torch.full(shape, -0.0), 0
    index, source = torch.zeros(n, dtype=torch.int64), torch.zeros((n, *shape[1:]))
    assert_same_bits(det_index_add(x, 0, index, source), torch.zeros(shape))


def test_wrong_arguments_are_refused_with_a_reason():
    x, index, source = torch.zeros(4, 3), torch.tensor([0, 4]), torch.zeros(2, 3)
    for make, message in [
        (lambda: det_index_add(x, 0, index, source), r"\[0, 4\)"),
        (lambda: det_index_add(x, 0, index - 1, source), "-1"),
        (lambda: det_index_add(x, 2, index, source), "dim"),
        (lambda: det_index_add(x, 0, index, source[:1]), "source"),
        (lambda: det_index_add(x, 0, index.float(), source), "int64"),
        (lambda: det_index_add(x.double(), 0, index, source), "float64"),
        (lambda: det_scatter_add(x, 0, index, source), "dimensions"),
        (lambda: det_scatter_add(x, 0, torch.zeros(2, 4, dtype=torch.int64), source), "no larger"),
        (lambda: add_index_digits(zero_digits((4, 2)), index, source), "sizes"),
        (lambda: embedding(index, x[0]), "rows"),
        (lambda: embedding(index, x), r"\[0, 4\)"),
        (lambda: embedding_gradient(source, index[:1], 4), "indices"),
    ]:
        with pytest.raises(InputError, match=message):
            make()
