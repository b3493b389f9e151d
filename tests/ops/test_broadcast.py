"""Gradients through broadcasts: exact sums of rounded products, against fractions; digits of the same sums."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from det_lightning.errors import InputError
from det_lightning.ops.broadcast import OPERATIONS, arithmetic, expand
from det_lightning.ops.digits import det_finalize, zero_digits
from tests.ops.exact_oracle import INF, NAN, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits

SHAPES = [
    ((4, 3, 5), (5,)),
    ((4, 3, 5), (3, 1)),
    ((4, 3, 5), ()),
    ((4, 1, 5), (3, 1)),
    ((4, 3), (4, 3)),
    ((2, 3), (1, 3)),
]


class Place:
    """Digits of one operand, as the reducer keeps them."""

    def __init__(self, shape):
        self.kept, self.asked, self.finished = zero_digits(shape), 0, 0

    def digits(self):
        self.asked += 1
        return self.kept

    def added(self):
        self.finished += 1


class Nowhere:
    def digits(self):
        return None


def rounded_terms(operation, side, g, a, b):
    """The products of the written formula, in NumPy's float32."""
    g, a, b = (each.numpy() for each in (g, a, b))
    with np.errstate(all="ignore"):
        if operation == "mul":
            return g * (b if side == 0 else a)
        if operation == "div":
            return g / b if side == 0 else -((g * (a / b)) / b)
        return -g if (operation, side) == ("sub", 1) else g


def exact_sums(terms, shape):
    """Fractions of the terms, added over the places of each element of `shape` and rounded once."""
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    of_element = np.broadcast_to(numbers, terms.shape)
    patterns = [
        rounded([Fraction(float(t)) for t in terms[of_element == n]], torch.float32) for n in range(numbers.size)
    ]
    return from_patterns(patterns, shape, torch.float32)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_values_and_gradients_are_the_written_ones(operation, first, second):
    shape = torch.broadcast_shapes(first, second)
    a, b, g = wide_values(1, *first, spread=3), wide_values(2, *second, spread=3), wide_values(3, *shape, spread=8)
    b = torch.where(b == 0, 1.5, b)
    a.requires_grad_()
    b.requires_grad_()
    out = arithmetic(operation, a, b)
    out.backward(g)
    spread = a.detach().expand(shape), b.detach().expand(shape)
    assert_same_bits(out.detach(), getattr(torch, operation)(*spread))
    for side, operand in enumerate((a, b)):
        expected = exact_sums(rounded_terms(operation, side, g, *spread), tuple(operand.shape))
        assert_same_bits(operand.grad + 0.0, expected + 0.0)  # -0 where nothing was summed
    places = Place(first), Place(second)
    given = a.detach().requires_grad_(), b.detach().requires_grad_()
    arithmetic(operation, *given, places=places).backward(g)
    for operand, place, leaf in zip((a, b), places, given, strict=True):
        assert leaf.grad is None and place.asked == place.finished == 1
        assert_same_bits(det_finalize(place.kept), operand.grad + 0.0)


def test_digits_of_parts_add_up_and_a_place_that_counts_for_nothing_gets_none():
    h, g = wide_values(4, 6, 5, spread=8), wide_values(5, 6, 5, spread=8)
    scale = wide_values(6, 5).requires_grad_()
    whole, parts = Place((5,)), Place((5,))
    arithmetic("mul", h, scale, places=(None, whole)).backward(g)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        arithmetic("mul", h[rows], scale, places=(None, parts)).backward(g[rows])
    assert_same_bits(det_finalize(whole.kept), det_finalize(parts.kept))
    arithmetic("mul", h, scale, places=(None, Nowhere())).backward(g)


def test_a_float_sum_fails_the_same_check():
    h, g = wide_values(4, 64, 5, spread=8), wide_values(5, 64, 5, spread=8)
    one, two = (wide_values(6, 5).requires_grad_() for _ in range(2))
    (h * one).backward(g)
    for rows in (slice(0, 20), slice(20, 64)):
        (h[rows] * two).backward(g[rows])
    assert one.grad.numpy().tobytes() != two.grad.numpy().tobytes()


def test_formats_are_promoted_and_gradients_return_in_their_own():
    h = torch.randn(4, 3).bfloat16().requires_grad_()
    scale = torch.randn(3, requires_grad=True)
    out = arithmetic("mul", h, scale)
    assert out.dtype is torch.float32
    out.backward(torch.ones(4, 3))
    assert h.grad.dtype is torch.bfloat16 and scale.grad.dtype is torch.float32
    assert arithmetic("add", torch.ones(3).bfloat16(), torch.ones(())).dtype is torch.bfloat16


def test_special_values_are_canonical():
    scale = torch.tensor([INF, 0.0, NAN]).requires_grad_()
    out = arithmetic("mul", torch.tensor([[0.0, INF, 1.0]]), scale)
    assert out.view(torch.int32).eq(0x7FC00000).all()
    out.backward(torch.tensor([[INF, -1.0, 0.0]]))
    assert_same_bits(scale.grad, torch.tensor([NAN, -INF, 0.0]))


def test_expand_copies_and_its_gradient_is_an_exact_sum():
    token, g = wide_values(7, 1, 2, 3).requires_grad_(), wide_values(8, 5, 2, 3, spread=8)
    out = expand(token, torch.Size((5, 2, 3)))
    out.backward(g)
    assert_same_bits(out.detach(), token.detach().expand(5, 2, 3).contiguous())
    assert_same_bits(token.grad, exact_sums(g.numpy(), (1, 2, 3)))
    place = Place((1, 2, 3))
    expand(token, torch.Size((5, 2, 3)), place=place).backward(g)
    assert_same_bits(det_finalize(place.kept), token.grad)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(3), torch.zeros(2), "do not broadcast"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "floating-point"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "one device, got cpu and meta"),
    ],
)
def test_operands_that_do_not_fit_are_refused(a, b, message):
    with pytest.raises(InputError, match=message):
        arithmetic("add", a, b)
