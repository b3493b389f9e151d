"""Gradients of the functions of one variable: round(g * d), d = f'(x) as the nearest float32."""

import pytest
import torch

from det_lightning.arithmetic.elementary import DERIVATIVES
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32
from det_lightning.errors import InputError
from det_lightning.kernels.cpu.elementary import elementwise, gradient
from det_lightning.ops import elementary
from tests.ops.exact_oracle import float32, from_patterns, product, rounded
from tests.same_bits import assert_same_bits

DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
FUNCTIONS = {name: getattr(elementary, f"det_{name}") for name in DERIVATIVES}
every = pytest.mark.parametrize("name", FUNCTIONS)
SPECIAL = [
    0,
    1 << 31,
    1,
    0x007FFFFF,
    0x00800000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x3F800000,
    0x7F7FFFFF,
    0x80000001,
]


def arguments(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([float32(SPECIAL), torch.randn(count, generator=generator).abs() * 3])


def products(g: torch.Tensor, d: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The oracle of products: fractions, rounded once; signed zeros as IEEE has them."""
    patterns = []
    for a, b in zip(g.double().tolist(), d.double().tolist(), strict=True):
        bits = rounded([product(a, b)], dtype)
        negative = torch.tensor(a).signbit() != torch.tensor(b).signbit()
        patterns.append(bits | 1 << (31 if dtype is torch.float32 else 15) if bits == 0 and negative else bits)
    return from_patterns(patterns, g.shape, dtype)


@every
@pytest.mark.parametrize("form", DTYPES, ids=lambda form: form.name)
def test_the_gradient_is_the_rounded_product_with_the_derivative(name, form):
    dtype = DTYPES[form]
    x, upstream = arguments(60).to(dtype), arguments(60, seed=2).flip(0).to(dtype)
    leaf = x.clone().requires_grad_()
    FUNCTIONS[name](leaf).backward(upstream)
    slope = elementwise(DERIVATIVES[name], x)
    assert_same_bits(leaf.grad, products(upstream, slope, dtype))
    assert_same_bits(gradient(DERIVATIVES[name], upstream, x, form), leaf.grad)


def test_gradients_below_the_normal_numbers_are_rounded_once():
    # 2^-66 (1 + 2^-7) squared, times powers of two around the last places of bfloat16, 2^-133.
    x = torch.zeros(9).bfloat16()
    upstream = torch.tensor([(1 + 2.0**-7) * 2.0**e for e in range(-134, -125)]).bfloat16()
    slope = elementwise("sigmoid_derivative", x.float())
    assert_same_bits(gradient("sigmoid_derivative", upstream, x, BFLOAT16), products(upstream, slope, torch.bfloat16))


@every
def test_the_slope_is_that_of_torchs_gradient(name):
    x = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2 + 0.1
    theirs = x.clone().requires_grad_()
    getattr(torch if hasattr(torch, name) else torch.nn.functional, name)(theirs).sum().backward()
    ours = x.float().requires_grad_()
    FUNCTIONS[name](ours).sum().backward()
    # Another function's derivative would be far off; the bits are the tests' above.
    assert ((ours.grad.double() - theirs.grad).abs() <= 2.0**-20 * (1 + theirs.grad.abs())).all()


@every
def test_shapes_strides_and_expanded_gradients(name):
    x = arguments(229).view(12, 20)
    expected = None
    for view in (x, x.t().contiguous().t()):
        leaf = view.detach().requires_grad_()
        FUNCTIONS[name](leaf).sum().backward()
        expected = leaf.grad if expected is None else expected
        assert_same_bits(leaf.grad, expected)
    leaf = torch.ones(0, 3, requires_grad=True)
    FUNCTIONS[name](leaf).sum().backward()
    assert leaf.grad.shape == (0, 3)


def test_the_derivative_of_a_rounded_function_is_another_number():
    # tanh'(x) by 1 - tanh(x)^2, as stock code has it, is rounded four times.
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    y = elementwise("tanh", x)
    assert (1 - y * y != elementwise("tanh_derivative", x)).sum() > 100


def test_a_gradient_of_another_dtype_is_refused():
    with pytest.raises(InputError, match="det_tanh: gradient has dtype float64"):
        elementary.compute_gradient("tanh", torch.ones(2, dtype=torch.float64), torch.ones(2))
