"""Each loss against its written sequence in NumPy float32, and close to the stock value; gradients are RN(g f')."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from det_lightning.arithmetic import elementary
from det_lightning.errors import InputError
from det_lightning.ops.item_losses import LOSSES, loss_items
from tests.same_bits import assert_same_bits

F32 = np.float32
STOCK = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.7, reduction=reduction),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, delta=0.7, reduction=reduction),
    "bce_logits": F.binary_cross_entropy_with_logits,
    "bce": F.binary_cross_entropy,
}
PARAMETERS = {"smooth_l1": (0.7,), "huber": (0.7,)}


def inputs(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    x, y = torch.randn(400, generator=generator), torch.randn(400, generator=generator)
    if kind.startswith("bce"):
        y = torch.rand(400, generator=generator)
    return (torch.rand(400, generator=generator) if kind == "bce" else x * 3), y


@pytest.mark.parametrize("kind", LOSSES)
def test_values_and_gradients_are_near_the_stock_ones(kind):
    """A check of the formula, not of bits: the stock kernels round elsewhere."""
    x, y = inputs(kind)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    items = loss_items(kind, ours, y, *PARAMETERS.get(kind, ()))
    stock = STOCK[kind](theirs, y, reduction="none")
    items.sum().backward()
    stock.sum().backward()
    for a, b in ((items, stock), (ours.grad, theirs.grad)):
        scale = np.maximum(np.abs(b.detach().numpy()), 1e-2)
        assert float(np.max(np.abs(a.detach().numpy() - b.detach().numpy()) / scale)) < 2e-5


def function(name: str, x: np.float32) -> np.float32:
    """The correctly rounded function by its definition on integers."""
    return np.uint32(getattr(elementary, name)(int(F32(x).view(np.uint32)))).view(F32)


BOUND = F32(0.7)  # beta of smooth_l1 and delta of huber


def of_a_difference(kind: str, d: np.float32) -> tuple[np.float32, np.float32]:
    size, sign, square, beyond = abs(d), F32(np.sign(d)), F32(d * d), F32(abs(d) - F32(0.5 * 0.7))
    if kind == "mse":
        return square, F32(F32(2) * d)
    if kind == "l1":
        return size, sign
    if kind == "smooth_l1":
        return (F32(F32(square * F32(0.5)) / BOUND), F32(d / BOUND)) if size < BOUND else (beyond, sign)
    return (F32(square * F32(0.5)), d) if size <= BOUND else (F32(BOUND * beyond), F32(BOUND * sign))


def of_a_logit(x: np.float32, y: np.float32) -> tuple[np.float32, np.float32]:
    e = function("exp", -abs(x))
    more = F32(1 + e)
    probability = F32(1 / more) if x >= 0 else F32(e / more)
    item = F32(F32(max(x, F32(0)) - F32(x * y)) + function("log", more))
    return item, F32(probability - y)


def of_a_probability(x: np.float32, y: np.float32) -> tuple[np.float32, np.float32]:
    rest = F32(1 - x)
    log, log_rest = (max(function("log", each), F32(-100)) for each in (x, rest))
    item = -F32(F32(y * log) + F32(F32(1 - y) * log_rest))
    return item, F32(F32(x - y) / max(F32(x * rest), F32(2.0**-40)))


def written(kind: str, x: np.float32, y: np.float32) -> tuple[np.float32, np.float32]:
    """(item, derivative) by the sequence at the head of the module."""
    if kind == "bce_logits":
        return of_a_logit(x, y)
    return of_a_probability(x, y) if kind == "bce" else of_a_difference(kind, F32(x - y))


# Where the sequences branch, and where floats end.
CORNERS = {
    "bce_logits": [(0.0, 0.3), (-0.0, 0.3), (120.0, 0.0), (-120.0, 1.0), (1e-40, 0.5), (3e38, 0.5), (-3e38, 0.5)],
    "bce": [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (2.0**-149, 0.5), (1 - 2.0**-24, 0.5), (2.0**-41, 1.0)],
    "difference": [(1.0, 1.0), (-0.0, 0.0), (0.7, 0.0), (-0.7, 0.0), (1e-40, 0.0), (0.0, 1e-22), (3e38, -3e38)],
}


@pytest.mark.parametrize("kind", LOSSES)
@np.errstate(over="ignore", under="ignore")
def test_items_and_gradients_follow_the_written_sequence(kind):
    x, y = (
        torch.cat([each[:80], torch.tensor(corner)])
        for each, corner in zip(inputs(kind), zip(*CORNERS.get(kind, CORNERS["difference"]), strict=True), strict=True)
    )
    items, derivative = zip(*[written(kind, *each) for each in zip(x.numpy(), y.numpy(), strict=True)], strict=True)
    upstream = torch.linspace(-1.0, 2.0, len(x))
    x.requires_grad_()
    found = loss_items(kind, x, y, *PARAMETERS.get(kind, ()))
    found.backward(upstream)
    assert_same_bits(found.detach(), torch.from_numpy(np.array(items, F32)))
    assert_same_bits(x.grad, upstream * torch.from_numpy(np.array(derivative, F32)))


def test_the_stock_loss_fails_the_same_check():
    x, y = inputs("bce_logits")
    items = np.array([of_a_logit(*each)[0] for each in zip(x.numpy(), y.numpy(), strict=True)], F32)
    stock = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    assert stock.numpy().tobytes() != items.tobytes()


def with_pos_weight(x: np.float32, y: np.float32, p: np.float32) -> tuple[np.float32, np.float32]:
    """(item, derivative) of the cross-entropy of logits by its written sequence."""
    e = function("exp", -abs(x))
    more, q, rest = F32(1 + e), F32(F32(F32(p - 1) * y) + 1), F32(1 - y)
    n = F32(e / more) if x >= 0 else F32(1 / more)
    item = F32(F32(rest * x) + F32(q * F32(max(-x, F32(0)) + function("log", more))))
    return item, F32(rest - F32(q * n))


def test_pos_weight_follows_the_written_sequence():
    x, y = (each[:60].view(12, 5) for each in inputs("bce_logits"))
    y[0], p = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([0.3, 1.0, 17.5, 0.0, 1e-3])
    expected = [
        with_pos_weight(*each)
        for each in zip(x.flatten().numpy(), y.flatten().numpy(), p.repeat(12).numpy(), strict=True)
    ]
    items, derivative = (torch.from_numpy(np.array(part, F32)).view(12, 5) for part in zip(*expected, strict=True))
    upstream = torch.linspace(-1.0, 2.0, 60).view(12, 5)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    found = loss_items("bce_logits", ours, y, p)
    found.backward(upstream)
    assert_same_bits(found.detach(), items)
    assert_same_bits(ours.grad, upstream * derivative)
    stock = F.binary_cross_entropy_with_logits(theirs, y.double(), pos_weight=p.double(), reduction="none")
    stock.backward(upstream.double())
    assert torch.allclose(found.double(), stock, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("shape", [(80, 5), (5,), (80, 1), ()])
def test_a_weight_multiplies_items_and_derivatives_with_one_rounding_each(kind, shape):
    x, y = (each.view(80, 5) for each in inputs(kind))
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 3
    weight.view(-1)[0] = 0.0
    ones, plain, weighted = torch.ones(80, 5), x.clone().requires_grad_(), x.clone().requires_grad_()
    items = loss_items(kind, plain, y, *PARAMETERS.get(kind, ()))
    items.backward(ones)
    found = loss_items(kind, weighted, y, *PARAMETERS.get(kind, ()), weight=weight)
    found.backward(ones * 0.7)
    assert_same_bits(found.detach(), items.detach() * weight)
    assert_same_bits(weighted.grad, plain.grad * weight * 0.7)


def test_an_element_does_not_depend_on_its_place_or_neighbours():
    for kind in LOSSES:
        x, y = inputs(kind)
        whole = loss_items(kind, x, y, *PARAMETERS.get(kind, ()))
        for place in (0, 7, 399):
            alone = loss_items(kind, x[place : place + 1], y[place : place + 1], *PARAMETERS.get(kind, ()))
            assert alone.numpy().tobytes() == whole[place : place + 1].numpy().tobytes()


def test_special_values():
    nan, inf, canonical, infinity = math.nan, math.inf, 0x7FC00000, 0x7F800000
    found = loss_items("mse", torch.tensor([nan, inf, 1e30]), torch.zeros(3))
    assert found.view(torch.int32).tolist() == [canonical, infinity, infinity]
    found = loss_items("bce_logits", torch.tensor([nan, inf, -inf, 1e4, -1e4]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]))
    assert found[:3].view(torch.int32).tolist() == [canonical] * 3
    assert found.tolist()[3:] == [1e4, 0.0]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(3), "broadcast"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "float32"),
        (torch.zeros(3), torch.zeros(3, requires_grad=True), "detach"),
    ],
)
def test_bad_targets_are_refused(x, y, message):
    with pytest.raises(InputError, match=message):
        loss_items("mse", x, y)


@pytest.mark.parametrize(
    "weight", [torch.ones(3, dtype=torch.int64), torch.ones(2), torch.ones(3, 1), torch.ones(3, requires_grad=True)]
)
@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_bad_weights_are_refused(name, weight):
    arguments, options = ((weight,), {}) if name == "pos_weight" else ((), {"weight": weight})
    with pytest.raises(InputError, match=rf"takes a {name} of float32 without gradient .* \[3\], got torch"):
        loss_items("bce_logits", torch.zeros(3), torch.zeros(3), *arguments, **options)


def test_probabilities_out_of_range_are_refused():
    with pytest.raises(InputError, match="with_logits"):
        loss_items("bce", torch.tensor([1.5]), torch.tensor([1.0]))
