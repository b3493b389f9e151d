"""Digits of a moved parameter's gradient arrive at the elements that were moved: as a view of its digits, or by index."""

import pytest
import torch
from torch import nn

from det_lightning.layers.function_mode import FunctionMode
from det_lightning.ops.digits import det_finalize, zero_digits
from det_lightning.ops.linear import DigitSink
from det_lightning.ops.reduction import det_sum_partial
from tests.same_bits import assert_same_bits


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(2, 6))
        self.register_buffer("index", torch.tensor([3, 3, 0]))


class Sink(DigitSink):
    def __init__(self, model):
        self.kept = {id(p): zero_digits(p.shape) for p in model.parameters()}
        self.expected, self.finished, self.products = [], [], 0

    def expect(self, parameter):
        self.expected.append(id(parameter))

    def digits(self, parameter):
        return self.kept[id(parameter)]

    def added(self, parameter):
        self.finished.append(id(parameter))

    def add_product(self, parameter, x, w):
        self.products += 1
        super().add_product(parameter, x, w)


VIEWS = {
    "itself": lambda m: m.p,
    "transposed": lambda m: m.p.t(),
    "viewed": lambda m: m.p.view(2, 2, 6).permute(2, 0, 1),
    "sliced": lambda m: m.p[1:, ::2].unsqueeze(0),
    "one element": lambda m: m.p[2, 3],
    "a row of a piece": lambda m: m.p.split([1, 3])[1].unbind(0)[2],
    "copied": lambda m: m.p.clone()[:, 1],
    "contiguous and viewed": lambda m: m.p[0].contiguous().view(3, 2),
}
COPIES = {
    "transposed and flat": lambda m: m.p.t().reshape(-1),
    "contiguous of a transpose": lambda m: m.p.t().contiguous().view(-1),
    "joined": lambda m: torch.cat([m.p, m.q])[1:5],
    "joined with itself": lambda m: torch.cat([m.p, m.p[:2]], dim=0).t(),
    "stacked": lambda m: torch.stack([m.q, m.p[:2]]).flatten(),
    "by index": lambda m: m.p[m.index],
    "by index_select": lambda m: m.q.index_select(1, m.index).t(),
}
MOVES = VIEWS | COPIES


@pytest.mark.parametrize("name", MOVES)
def test_digits_follow_the_moves(name):
    model = Holder()
    sink = Sink(model)
    with FunctionMode(model, sink=sink, samples=12, strict=True) as mode:
        moved = MOVES[name](model)
        place = mode.meetings.place(moved)
    gradient = torch.randint(-9, 9, moved.shape).float()  # whole numbers: sums of floats are exact
    moved.backward(gradient)
    digits = place.digits()
    digits += det_sum_partial(gradient.unsqueeze(-1), dim=-1)
    place.added()
    assert sorted(sink.expected) == sorted(sink.finished)
    for parameter in model.parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_same_bits(det_finalize(sink.kept[id(parameter)]), expected + 0.0)
    kept = [digits.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in sink.kept.values()]
    assert any(kept) == (name in VIEWS), "a view of a parameter has no digits of its own"


@pytest.mark.parametrize("name", ["itself", "transposed", "two columns", "transposed and repeated"])
def test_products_arrive_where_the_elements_came_from(name):
    moves = MOVES | {
        "two columns": lambda m: m.p[:, 1:3],
        "transposed and repeated": lambda m: torch.cat([m.p.t()] * 2),
    }
    model = Holder()
    sink = Sink(model)
    with FunctionMode(model, sink=sink, samples=12, strict=True) as mode:
        moved = moves[name](model)
        place = mode.meetings.place(moved)
    x, w = (torch.randint(-9, 9, (size, 3)).float() for size in moved.shape)
    moved.backward(x @ w.t())
    place.add_product(x, w)
    assert sorted(sink.expected) == sorted(sink.finished)
    assert_same_bits(det_finalize(sink.kept[id(model.p)]), model.p.grad + 0.0)
    assert sink.products == (1 if name in ("itself", "transposed") else 0)
