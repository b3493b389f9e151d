"""Muon against its sequence written out with exact fractions, byte for byte."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from det_lightning.optim.muon import orthogonalised
from det_lightning.optim.stepping import check_optimizer, step_optimizer
from tests.ops.exact_oracle import INF, from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def product(x, y, dtype):
    """Each element of x y as one exact sum, rounded once."""
    sums = [
        rounded([Fraction(a.item()) * Fraction(b.item()) for a, b in zip(row, column, strict=True)], dtype)
        for row in x
        for column in y.t()
    ]
    return from_patterns(sums, (len(x), y.shape[1]), dtype)


def f32(value) -> torch.Tensor:
    return torch.tensor(value, dtype=FLOAT32)


def reference(parameter, gradients, *, lr, momentum, nesterov, weight_decay, ns_coefficients, adjust_lr_fn):
    a, b, c = map(f32, ns_coefficients)
    p, m, keep = parameter.clone(), torch.zeros_like(parameter), f32(1.0 - momentum)
    rows, columns = p.shape
    ratio = 0.2 * math.sqrt(max(p.shape)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    for g in gradients:
        m = m + (g - m) * keep
        u = m - (m - g) * keep if nesterov else m
        x = (u.t() if rows > columns else u).bfloat16()
        squares = sum(Fraction(v) ** 2 for v in x.flatten().tolist())
        x = (x.float() / max(f32(math.sqrt(squares)), f32(1e-7))).bfloat16()
        for _ in range(3):
            gram = product(x, x.t(), BFLOAT16)
            h = gram.float() * b + product(gram, gram, FLOAT32) * c
            x = (x.float() * a + product(h.bfloat16(), x, FLOAT32)).bfloat16()
        x = x.t() if rows > columns else x
        p = p * f32(1.0 - lr * weight_decay) - x.float() * f32(lr * ratio)
    return p, m


OPTIONS = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "ns_coefficients": (3.4445, -4.775, 2.0315)}


def stepped(parameter, gradients, **options):
    parameter = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.Muon([parameter], ns_steps=3, **options)
    check_optimizer(optimizer)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_optimizer(optimizer)
    return parameter.detach(), optimizer.state[parameter]["momentum_buffer"]


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize(("nesterov", "adjust"), [(True, None), (False, "match_rms_adamw")])
def test_each_step_is_the_written_sequence(shape, nesterov, adjust):
    parameter, gradients = (
        wide_values(1, *shape, spread=1.0),
        [wide_values(step, *shape, spread=1.0) for step in (2, 3)],
    )
    options = {**OPTIONS, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours, momentum = stepped(parameter, gradients, **options)
    expected, m = reference(parameter, gradients, **options)
    assert_same_bits(ours, expected)
    assert_same_bits(momentum, m)


def test_it_is_the_stock_step_up_to_bfloat16_and_its_state_is_torchs_own():
    parameter, gradient = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), wide_values(4, 6, 8, spread=1)
    stock = torch.nn.Parameter(parameter.clone())
    stock.grad = gradient.clone()
    optimizer = torch.optim.Muon([stock], **OPTIONS, ns_steps=3)
    optimizer.step()
    ours, momentum = stepped(parameter, [gradient], **OPTIONS)
    assert np.abs((stock.detach() - ours).numpy()).max() < 1e-3 < (parameter - ours).abs().max()
    assert set(optimizer.state[stock]) == {"momentum_buffer"}
    assert (optimizer.state[stock]["momentum_buffer"] - momentum).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (2, 9)])
def test_odd_shapes_zeros_and_infinities(shape):
    assert_same_bits(orthogonalised(torch.zeros(shape), (3.0, -4.0, 2.0), 2, 1e-7), torch.zeros(shape).bfloat16())
    matrix = torch.zeros(shape)
    matrix[0, 0] = INF
    result = orthogonalised(matrix, (3.0, -4.0, 2.0), 2, 1e-7)
    assert set(result[result.isnan()].view(torch.int16).tolist()) <= {0x7FC0}
