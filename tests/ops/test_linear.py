"""linear and its gradients against exact fractions; what it leaves in a sink are the digits of the same sums."""

import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.errors import InputError
from det_lightning.layers.linear import DetLinear
from det_lightning.ops.digits import det_finalize, digits_value, zero_digits
from det_lightning.ops.linear import DigitSink, linear
from tests.ops.exact_oracle import NAN, any_patterns, cancelling_pair, exact_gemm, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits


class Sink(DigitSink):
    """Keeps the digits of each parameter, and how often it was asked for them."""

    def __init__(self, *parameters: torch.Tensor):
        self.kept = {id(parameter): zero_digits(parameter.shape) for parameter in parameters}
        self.asked = self.finished = 0

    def digits(self, parameter: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return self.kept[id(parameter)]

    def added(self, parameter: torch.Tensor) -> None:
        self.finished += 1


class NoSink(DigitSink):
    def digits(self, parameter: torch.Tensor) -> None:
        return None


def operands(seed: int, rows: int, features: int, out: int) -> list[torch.Tensor]:
    """x, weight, bias and an upstream gradient."""
    shapes = ((rows, features), (out, features), (out,), (rows, out))
    return [wide_values(seed + place, *shape) for place, shape in enumerate(shapes)]


def gradients(x, weight, bias, upstream, sink=None):
    x, weight, bias = (each.clone().requires_grad_() for each in (x, weight, bias))
    linear(x, weight, bias, sink=sink and sink(weight, bias)).backward(upstream)
    return x.grad, weight.grad, bias.grad


def test_the_bias_is_one_more_term_of_the_exact_sum():
    x, weight, bias, _ = operands(1, 5, 17, 4)
    assert_same_bits(linear(x, weight, bias), exact_gemm(x, weight, bias))
    twice = exact_gemm(x, weight) + bias
    assert (linear(x, weight, bias).view(torch.int32) != twice.view(torch.int32)).any(), "one rounding, not two"


def test_outputs_and_gradients_are_exact_sums_rounded_once():
    x, weight, bias, upstream = operands(2, 9, 6, 5)
    by_x, by_weight, by_bias = gradients(x, weight, bias, upstream)
    assert_same_bits(by_x, exact_gemm(upstream, weight.t()))
    assert_same_bits(by_weight, exact_gemm(upstream.t(), x.t()))
    sums = [rounded([Fraction(value) for value in column], torch.float32) for column in upstream.double().t().tolist()]
    assert_same_bits(by_bias, from_patterns(sums, (5,), torch.float32))


def test_stock_linear_fails_the_same_check():
    x, weight = cancelling_pair(3, 64)
    assert_same_bits(linear(x, weight), exact_gemm(x, weight))
    assert (F.linear(x, weight).view(torch.int32) != exact_gemm(x, weight).view(torch.int32)).any()
    rounded_float64 = F.linear(x.double(), weight.double()).float()
    assert (rounded_float64.view(torch.int32) != exact_gemm(x, weight).view(torch.int32)).any()


def test_special_values_follow_the_contract_in_both_directions():
    x, weight, upstream = any_patterns(4, 6, 5), any_patterns(5, 4, 5), any_patterns(6, 6, 4)
    bias = any_patterns(7, 4)
    by_x, by_weight, by_bias = gradients(x, weight, bias, upstream)
    assert_same_bits(linear(x, weight, bias), exact_gemm(x, weight, bias))
    assert_same_bits(by_x, exact_gemm(upstream, weight.t()))
    assert_same_bits(by_weight, exact_gemm(upstream.t(), x.t()))
    sums = [rounded(column, torch.float32) for column in upstream.double().t().tolist()]
    assert_same_bits(by_bias, from_patterns(sums, (4,), torch.float32))


def test_the_sink_gets_the_exact_digits_and_autograd_gets_none_of_them():
    x, weight, bias, upstream = (each.requires_grad_() for each in operands(8, 7, 6, 5))
    upstream = upstream.detach()
    sink = Sink(weight, bias)
    linear(x, weight, bias, sink=sink).backward(upstream)
    assert weight.grad is None and bias.grad is None and sink.asked == sink.finished == 2
    assert_same_bits(x.grad, exact_gemm(upstream, weight.detach().t()))
    assert_same_bits(det_finalize(sink.kept[id(weight)]), exact_gemm(upstream.t(), x.detach().t()))
    value = digits_value(sink.kept[id(weight)][2, 3])
    assert value == sum(
        Fraction(a) * Fraction(b) for a, b in zip(upstream[:, 2].tolist(), x[:, 3].tolist(), strict=True)
    )
    assert digits_value(sink.kept[id(bias)][1]) == sum(map(Fraction, upstream[:, 1].tolist()))


@given(cuts=st.lists(st.integers(0, 12), max_size=5), seed=st.integers(0, 2**32))
def test_digits_of_micro_batches_add_up_to_those_of_the_whole_batch(cuts, seed):
    x, weight, bias, upstream = operands(9, 12, 4, 3)
    order = random.Random(seed).sample(range(12), 12)
    whole, parts = Sink(weight.requires_grad_(), bias.requires_grad_()), Sink(weight, bias)
    linear(x, weight, bias, sink=whole).backward(upstream)
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True):
        rows = order[first:last]
        linear(x[rows], weight, bias, sink=parts).backward(upstream[rows])
    for parameter in (weight, bias):
        assert_same_bits(det_finalize(parts.kept[id(parameter)]), det_finalize(whole.kept[id(parameter)]))


def test_a_row_does_not_depend_on_the_batch_around_it():
    x, weight, bias, upstream = operands(10, 33, 29, 6)
    whole, (by_x, _, _) = linear(x, weight, bias), gradients(x, weight, bias, upstream)
    for first, last in ((0, 1), (5, 7), (2, 33)):
        assert_same_bits(linear(x[first:last], weight, bias), whole[first:last])
        assert_same_bits(gradients(x[first:last], weight, bias, upstream[first:last])[0], by_x[first:last])


def test_a_micro_batch_of_weight_zero_leaves_no_digits():
    x, weight, bias, upstream = (each.requires_grad_() for each in operands(11, 3, 4, 2))
    linear(x, weight, bias, sink=NoSink()).backward(upstream.detach())
    assert weight.grad is None and bias.grad is None
    assert_same_bits(x.grad, exact_gemm(upstream.detach(), weight.detach().t()))


def test_only_what_needs_a_gradient_is_computed():
    x, weight, bias, upstream = operands(12, 3, 4, 2)
    sink = Sink(weight, bias.requires_grad_())
    linear(x, weight, bias, sink=sink).backward(upstream)
    assert sink.asked == 1
    assert not sink.kept[id(weight)].any()


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (2, 0, 4), (0, 4), (1, 1, 1, 4)])
def test_all_dimensions_but_the_last_are_rows(shape):
    _, weight, bias, _ = operands(13, 1, 4, 3)
    x = wide_values(14, *shape)
    result = linear(x, weight, bias)
    assert result.shape == (*shape[:-1], 3)
    assert_same_bits(result.reshape(-1, 3), linear(x.reshape(-1, 4), weight, bias))


def test_without_features_the_output_is_the_bias_and_without_a_bias_zero():
    bias = wide_values(15, 3)
    assert_same_bits(linear(torch.zeros(2, 0), torch.zeros(3, 0), bias), bias.expand(2, 3))
    assert_same_bits(linear(torch.zeros(2, 0), torch.zeros(3, 0)), torch.zeros(2, 3))
    weight = torch.zeros(3, 0, requires_grad=True)
    linear(torch.zeros(2, 0), weight).backward(torch.ones(2, 3))
    assert weight.grad.shape == (3, 0)


def test_strides_and_views_change_nothing():
    x, weight, bias, upstream = operands(16, 6, 8, 4)
    expected = gradients(x, weight, bias, upstream)
    strided = torch.empty(8, 6).t().copy_(x)
    expanded = torch.empty(4, 8, 2)[..., 1].copy_(weight)
    for ours, theirs in zip(gradients(strided, expanded, bias, upstream.t().contiguous().t()), expected, strict=True):
        assert_same_bits(ours, theirs)
    constant = torch.ones(1, 1).expand(6, 4)
    for ours, theirs in zip(
        gradients(x, weight, bias, constant), gradients(x, weight, bias, constant.contiguous()), strict=True
    ):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_formats_are_rounded_once_straight_to_their_own(dtype):
    x, weight, bias, _ = (each.clamp(-100, 100).to(dtype) for each in operands(17, 4, 9, 3))
    assert_same_bits(linear(x, weight, bias), exact_gemm(x, weight, bias, dtype))


def test_an_in_place_operation_may_follow():
    x, weight, bias, _ = operands(18, 6, 4, 3)
    weight.requires_grad_()
    for shape in ((6, 4), (2, 3, 4)):
        weight.grad = None
        y = linear(x.reshape(shape), weight, bias)
        y.mul_(2.0)
        y.backward(torch.ones_like(y))
        assert_same_bits(weight.grad, exact_gemm(torch.full((3, 6), 2.0), x.t()))


def test_it_is_differentiable_once():
    x, weight, _, upstream = (each.requires_grad_() for each in operands(19, 2, 3, 2))
    (by_x,) = torch.autograd.grad(linear(x, weight), x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        by_x.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (4, 5), None), r"got x \(2, 3\) and weight \(4, 5\)"),
        (((), (4, 5), None), r"got x \(\) and weight"),
        (((2, 3), (3,), None), r"weight \(3,\)"),
        (((2, 3), (4, 3), (3,)), r"bias of shape \[4\], got \(3,\)"),
        (((2, 3), (4, 3), (4, 1)), r"bias of shape \[4\], got \(4, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(InputError, match=message):
        linear(*(None if shape is None else torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("dtypes", [(torch.float64,) * 3, (torch.float32, torch.bfloat16, torch.float32)])
def test_dtypes_that_do_not_fit_are_refused(dtypes):
    x, weight, bias = (torch.zeros(shape, dtype=d) for shape, d in zip(((2, 3), (4, 3), (4,)), dtypes, strict=True))
    with pytest.raises(InputError):
        linear(x, weight, bias)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_the_module_is_a_linear_layer_with_the_same_state():
    stock = torch.nn.Linear(5, 3)
    exact = DetLinear(5, 3)
    exact.load_state_dict(stock.state_dict())
    x = wide_values(20, 4, 5)
    assert_same_bits(exact(x), exact_gemm(x, stock.weight.detach(), stock.bias.detach()))
    assert isinstance(exact, torch.nn.Linear)
    assert DetLinear(5, 3, bias=False).bias is None
    assert_same_bits(DetLinear(0, 2, bias=False)(torch.zeros(1, 0)), torch.zeros(1, 2))


def test_a_nan_in_one_sample_spoils_the_weight_gradient_and_no_other_row():
    x, weight, bias, upstream = operands(21, 4, 3, 2)
    clean = linear(x, weight, bias)
    x[2, 1] = NAN
    spoiled = linear(x, weight, bias)
    assert_same_bits(spoiled[[0, 1, 3]], clean[[0, 1, 3]])
    _, by_weight, by_bias = gradients(x, weight, bias, upstream)
    assert by_weight[:, 1].isnan().all() and not by_weight[:, [0, 2]].isnan().any() and not by_bias.isnan().any()
