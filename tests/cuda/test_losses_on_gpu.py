"""What a training step is made of: losses, means and their digits on the GPU against the CPU's bits, small sizes first."""

import pytest
import torch

from det_lightning.ops.digits import det_finalize
from det_lightning.ops.elementary import det_exp, det_log
from det_lightning.ops.item_losses import LOSSES, loss_items
from det_lightning.ops.loss import cross_entropy_items, exact_mean
from det_lightning.ops.means import item_digits
from det_lightning.ops.reduction import det_sum, det_sum_partial
from tests.same_bits import assert_same_bits

pytestmark = pytest.mark.cuda
SIZES = [1, 2, 3, 5, 24, 31, 33, 120, 129, 1000]


def values(*shape: int, seed: int = 1, spread: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.ldexp(torch.rand(shape, generator=generator) - 0.5, exponents)


@pytest.mark.parametrize("size", SIZES)
def test_functions_of_few_elements(size):
    x = values(size)
    near_one = 1 + values(size, spread=1).abs() * 2.0**-8
    assert_same_bits(det_exp(x.cuda()).cpu(), det_exp(x))
    for argument in (x.abs(), near_one, torch.ones(size), x.exp()):
        assert_same_bits(det_log(argument.cuda()).cpu(), det_log(argument))


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_few_elements(size):
    x = values(size, 5)
    assert_same_bits(det_sum(x.cuda(), dim=1).cpu(), det_sum(x, dim=1))
    assert_same_bits(det_sum(x.cuda(), dim=0).cpu(), det_sum(x, dim=0))
    assert torch.equal(det_sum_partial(x.cuda()).cpu(), det_sum_partial(x))
    assert torch.equal(item_digits(x.cuda()).cpu(), item_digits(x))
    for denominator in (1, 3, 24, size):
        there = det_finalize(item_digits(x.cuda()), denominator=denominator)
        assert_same_bits(there.cpu(), det_finalize(item_digits(x), denominator=denominator))


@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy(size):
    logits, upstream = values(size, 5), values(size, seed=2)
    target = torch.arange(size) % 5
    here, there = logits.clone().requires_grad_(), logits.cuda().requires_grad_()
    items, items_there = cross_entropy_items(here, target), cross_entropy_items(there, target.cuda())
    assert_same_bits(items_there.detach().cpu(), items.detach())
    items.backward(upstream)
    items_there.backward(upstream.cuda())
    assert_same_bits(there.grad.cpu(), here.grad)
    assert_same_bits(exact_mean(items_there.detach()).cpu(), exact_mean(items.detach()))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("size", [1, 24, 129])
def test_losses_of_items(kind, size):
    x, y = values(size, 5), values(size, 5, seed=2)
    if kind.startswith("bce"):
        y = y.sigmoid()
    if kind == "bce":
        x = x.sigmoid()
    here, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    items, items_there = loss_items(kind, here, y), loss_items(kind, there, y.cuda())
    assert_same_bits(items_there.detach().cpu(), items.detach())
    items.sum().backward()
    items_there.sum().backward()
    assert_same_bits(there.grad.cpu(), here.grad)
