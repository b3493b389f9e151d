"""Gradients of batched products are exact products too, each element rounded once."""

import pytest
import torch

from det_lightning.ops.gemm import det_gemm
from det_lightning.ops.matmul import det_matmul
from tests.same_bits import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_batch_are_those_of_its_products(dtype):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 5, 7, generator=generator), torch.randn(3, 7, 4, generator=generator)
    x, y = x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
    out = det_matmul(x, y)
    upstream = torch.randn(out.shape, generator=generator)
    out.backward(upstream)
    for b in range(3):
        one, other = x.detach()[b], y.detach()[b]
        assert_same_bits(out.detach()[b], det_gemm(one, other.t()))
        assert_same_bits(x.grad[b], det_gemm(upstream[b], other, dtype=dtype))
        assert_same_bits(y.grad[b], det_gemm(one.t(), upstream[b].t(), dtype=dtype))


def test_an_empty_batch_has_gradients():
    x, y = torch.zeros(0, 2, 3, requires_grad=True), torch.zeros(0, 3, 4, requires_grad=True)
    det_matmul(x, y).sum().backward()
    assert x.grad.shape == x.shape and y.grad.shape == y.shape
