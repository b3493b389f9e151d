"""The custom ops under torch's own checks, under a compiler, and beside a second copy of the package."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.library import opcheck

import det_lightning.ops.registration
from det_lightning.layers.linear import DetLinear
from det_lightning.ops.digits import det_finalize, zero_digits
from det_lightning.ops.elementary import det_exp, det_log
from det_lightning.ops.gemm import add_gemm_digits, det_gemm, det_gemm_partial
from det_lightning.ops.reduction import add_sum_digits, det_sum, det_sum_partial
from tests.ops.exact_oracle import exact_gemm, wide_values
from tests.same_bits import assert_same_bits

X, W, BIAS = wide_values(1, 5, 7, spread=3), wide_values(2, 3, 7, spread=3), wide_values(3, 3, spread=3)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


ARGUMENTS = {
    "gemm": lambda: (leaf(X), leaf(W), leaf(BIAS), None, "auto"),
    "linear": lambda: (leaf(X), leaf(W), leaf(BIAS)),
    "gemm_partial": lambda: (X, W, "auto"),
    "add_gemm_digits": lambda: (zero_digits((5, 3)), X, W, "auto"),
    "sum": lambda: (leaf(X), [0], False, None),
    "sum_partial": lambda: (X, [1]),
    "add_sum_digits": lambda: (zero_digits((7,)), X, [0]),
    "finalize": lambda: (det_gemm_partial(X, W), torch.float32, 3),
    "elementary": lambda: ("exp", leaf(X), torch.float32),
    "elementary_gradient": lambda: ("tanh", X, X.bfloat16()),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_torch_finds_no_fault_with_an_op(name):
    opcheck(getattr(torch.ops.det_lightning, name), ARGUMENTS[name]())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gemm", lambda: (X.bfloat16(), leaf(W.bfloat16()), None, torch.bfloat16, "long_accumulator")),
        ("linear", lambda: (leaf(X.half()), W.half(), None)),
        ("elementary", lambda: ("log1p", leaf(X.abs().half()), torch.bfloat16)),
        ("sum", lambda: (leaf(X), None, True, torch.bfloat16)),
        ("sum", lambda: (X, [0, 1], False, None)),
    ],
)
def test_torch_finds_no_fault_with_other_arguments(name, arguments):
    opcheck(getattr(torch.ops.det_lightning, name), arguments())


def test_every_registered_op_is_checked():
    registered = {
        value._qualname.split("::")[1]
        for value in vars(det_lightning.ops.registration).values()
        if isinstance(value, torch._library.custom_ops.CustomOpDef)
    }
    assert registered == set(ARGUMENTS)


def test_gradients_of_a_product_are_exact_products():
    x, w, bias = leaf(X), leaf(W), leaf(BIAS)
    upstream = wide_values(4, 5, 3, spread=3)
    det_gemm(x, w, bias).backward(upstream)
    assert_same_bits(x.grad, exact_gemm(upstream, W.t()))
    assert_same_bits(w.grad, exact_gemm(upstream.t(), X.t()))
    assert_same_bits(bias.grad, det_sum(upstream, 0))


def test_gradients_of_a_sum_and_of_functions():
    x = leaf(X)
    det_sum(x, 1).backward(torch.arange(5.0))
    assert_same_bits(x.grad, torch.arange(5.0)[:, None].expand(5, 7))
    x = leaf(torch.rand(9) + 0.1)
    det_exp(x).backward(torch.full((9,), 3.0))
    assert_same_bits(x.grad, 3 * det_exp(x.detach()))
    x = leaf(torch.rand(9) + 0.1)
    det_log(x).backward(torch.full((9,), 3.0))
    assert_same_bits(x.grad, 3 * (1 / x.detach()))


def gradients(model: nn.Module, call, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and all gradients of one step through `call`."""
    model.zero_grad()
    x = leaf(x)
    out = call(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_has_the_bits_of_the_eager_one(backend):
    torch.manual_seed(0)
    model = nn.Sequential(DetLinear(12, 9), nn.ReLU(), DetLinear(9, 4, bias=False), nn.ReLU(), DetLinear(4, 3))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in (torch.randn(6, 12), torch.randn(2, 5, 12), torch.randn(11, 12)):
        for a, b in zip(gradients(model, model, x), gradients(model, compiled, x), strict=True):
            assert_same_bits(a, b)


def test_digits_are_added_inside_a_compiled_function():
    def step(digits, x, w):
        add_gemm_digits(digits, x, w)
        return det_finalize(digits + det_gemm_partial(x, w), denominator=7)

    torch._dynamo.reset()
    ours, theirs = zero_digits((5, 3)), zero_digits((5, 3))
    expected = step(ours, X, W)
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(theirs, X, W), expected)
    assert torch.equal(ours, theirs)


def test_sums_and_functions_compile_in_one_graph():
    def step(digits, x):
        add_sum_digits(digits, x, 0)
        return det_finalize(digits) + det_exp(det_sum(x, (0,))) + det_log(det_finalize(det_sum_partial(x, 0)).abs())

    torch._dynamo.reset()
    ours, theirs = zero_digits((7,)), zero_digits((7,))
    expected = step(ours, X)
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(theirs, X), expected)
    assert torch.equal(ours, theirs)


def test_a_second_copy_of_the_package_is_refused_by_name(tmp_path):
    package = Path(det_lightning.ops.registration.__file__).parents[1]
    copy = tmp_path / "copied_det_lightning"
    for part in ("arithmetic", "kernels", "ops"):
        shutil.copytree(package / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "errors.py", copy)
    (copy / "__init__.py").touch()
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(Exception, match="two copies of det_lightning") as refusal:
            __import__("copied_det_lightning.ops.gemm")
    finally:
        sys.path.remove(str(tmp_path))
    assert type(refusal.value).__name__ == "DetError"
    assert str(package / "ops" / "registration.py") in str(refusal.value)
