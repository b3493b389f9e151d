"""Adam and AdamW against their sequence written out in NumPy float32, byte for byte."""

import math

import numpy as np
import pytest
import torch

from det_lightning.optim.adam import adam_step, power
from det_lightning.optim.scaling import square_root
from det_lightning.optim.stepping import check_optimizer, step_optimizer

F32 = np.float32


def reference(parameter, gradients, *, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled):
    """The sequence of the module's head, one line an operation."""
    p = parameter.copy()
    m, v, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    b1, b2 = betas
    for step, gradient in enumerate(gradients, start=1):
        g = -gradient if maximize else gradient
        if weight_decay and decoupled:
            p = p * F32(1.0 - lr * weight_decay)
        elif weight_decay:
            g = g + p * F32(weight_decay)
        m = m * F32(b1) + g * F32(1.0 - b1)
        v = v * F32(b2) + (g * g) * F32(1.0 - b2)
        largest = np.maximum(largest, v)
        second = largest if amsgrad else v
        d = np.sqrt(second) / F32(math.sqrt(1.0 - power(b2, step))) + F32(eps)
        p = p - (m / d) * F32(lr / (1.0 - power(b1, step)))
    return p


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_each_step_is_the_written_sequence(cls, amsgrad, maximize, weight_decay):
    options = {"lr": 0.013, "betas": (0.9, 0.97), "eps": 1e-8, "weight_decay": weight_decay}
    rng = np.random.default_rng(4)
    start = rng.standard_normal((7, 5)).astype(F32)
    gradients = [(rng.standard_normal((7, 5)) * 10.0 ** rng.integers(-6, 3)).astype(F32) for _ in range(9)]
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = cls([parameter], amsgrad=amsgrad, maximize=maximize, **options)
    check_optimizer(optimizer)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        step_optimizer(optimizer)
    decoupled = cls is torch.optim.AdamW
    expected = reference(start, gradients, amsgrad=amsgrad, maximize=maximize, decoupled=decoupled, **options)
    assert parameter.detach().numpy().tobytes() == expected.tobytes()
    assert int(optimizer.state[parameter]["step"]) == 9


def test_the_state_is_torchs_own_and_loads_into_a_stock_optimizer():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    adam_step(optimizer)
    other = torch.nn.Parameter(torch.ones(3))
    stock = torch.optim.AdamW([other])
    stock.load_state_dict(optimizer.state_dict())
    other.grad = torch.ones(3)
    stock.step()
    assert set(stock.state[other]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("base", [0.9, 0.999, 0.97, 1.0, 0.0])
def test_powers_are_within_rounding_of_the_real_power(base):
    for exponent in (0, 1, 2, 3, 10, 1000):
        assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-13, abs_tol=0.0)


def test_the_square_root_is_correctly_rounded_for_every_significand():
    for first in (0x3F800000, 0x40000000, 0):  # both parities of the exponent, and the subnormals
        words = np.arange(first, first + (1 << 23), dtype=np.uint32)
        roots = square_root(torch.from_numpy(words.view(F32))).numpy()
        expected = np.sqrt(words.view(F32).astype(np.float64)).astype(F32)  # 53 >= 2 x 24 + 2: rounded once
        assert roots.tobytes() == expected.tobytes()
