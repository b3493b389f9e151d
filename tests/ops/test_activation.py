"""relu on every kind of value, and its gradient."""

import pytest
import torch

from det_lightning.ops.activation import relu
from tests.ops.exact_oracle import INF, NAN, NEGATIVE_INF, SMALLEST, any_patterns, float32
from tests.same_bits import assert_same_bits

#      x             relu(x)   passes the gradient
VALUES = [
    (0.0, 0.0, False),
    (-0.0, 0.0, False),
    (1.5, 1.5, True),
    (-1.5, 0.0, False),
    (SMALLEST, SMALLEST, True),
    (-SMALLEST, 0.0, False),
    (INF, INF, True),
    (NEGATIVE_INF, 0.0, False),
    (NAN, NAN, True),
]


def test_values_and_gradients_of_the_table():
    x = torch.tensor([row[0] for row in VALUES], requires_grad=True)
    result = relu(x)
    assert_same_bits(result.detach(), torch.tensor([row[1] for row in VALUES]))
    upstream = torch.arange(1.0, len(VALUES) + 1)
    result.backward(-upstream)
    assert_same_bits(
        x.grad, torch.tensor([-float(g) if row[2] else 0.0 for g, row in zip(upstream, VALUES, strict=True)])
    )


def test_nans_leave_canonical():
    x = float32([0xFFC00001, 0x7F800001, 0x7FC00000])
    assert relu(x).view(torch.int32).tolist() == [0x7FC00000] * 3
    x = torch.ones(3, requires_grad=True)
    relu(x).backward(float32([0xFFC00001, 0x7F800001, 0x7FC00000]))
    assert x.grad.view(torch.int32).tolist() == [0x7FC00000] * 3


def test_a_zero_gradient_is_positive_where_nothing_passes():
    x = torch.tensor([-1.0, 0.0], requires_grad=True)
    relu(x).backward(torch.tensor([-3.0, float("inf")]))
    assert_same_bits(x.grad, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_element_does_not_depend_on_its_place(dtype):
    x = any_patterns(3, 67).to(dtype)
    whole = relu(x)
    for first, last in ((0, 1), (3, 11), (60, 67)):
        assert_same_bits(relu(x[first:last]), whole[first:last])
    assert_same_bits(relu(x.view(67, 1).expand(67, 3))[:, 1], whole)


def test_empty_and_zero_dimensional():
    assert_same_bits(relu(torch.zeros(0, 3)), torch.zeros(0, 3))
    assert_same_bits(relu(torch.tensor(-2.0)), torch.tensor(0.0))
