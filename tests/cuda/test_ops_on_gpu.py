"""The public operations on CUDA tensors: the bytes and the errors of the CPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.errors import InputError  # noqa: E402
from det_lightning.kernels.dispatch import tensor_lanes  # noqa: E402
from det_lightning.ops.activation import relu  # noqa: E402
from det_lightning.ops.digits import det_combine, det_finalize, normalise_digits, zero_digits  # noqa: E402
from det_lightning.ops.elementary import det_exp, det_log  # noqa: E402
from det_lightning.ops.gemm import add_gemm_digits, det_gemm, det_gemm_partial  # noqa: E402
from det_lightning.ops.linear import linear  # noqa: E402
from det_lightning.ops.loss import cross_entropy_items, exact_mean  # noqa: E402
from det_lightning.ops.reduction import add_sum_digits, det_sum, det_sum_partial, sum_of_squares_partial  # noqa: E402

from .conftest import DEVICE, to_bits  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def tensor(*shape, seed=0, special=False) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    if special:
        x.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    return x


def assert_same_on_both(operation, *arguments) -> None:
    """The operation on CPU tensors and on their copies on the GPU: the same bytes, where they were asked for."""
    wanted = operation(*arguments)
    found = operation(*(a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments))
    wanted, found = (r if isinstance(r, tuple) else (r,) for r in (wanted, found))
    for one, other in zip(wanted, found, strict=True):
        assert other.is_cuda and other.dtype is one.dtype and other.shape == one.shape
        assert to_bits(other).tobytes() == to_bits(one).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_and_digits(dtype):
    x, w = tensor(40, 300, special=True).to(dtype), tensor(50, 300, seed=1).to(dtype)
    bias = tensor(50, seed=2).to(dtype)
    assert_same_on_both(lambda x, w, b: det_gemm(x, w, b, dtype=dtype), x, w, bias)
    assert_same_on_both(lambda x, w: det_gemm(x, w), x, w)
    assert_same_on_both(det_gemm_partial, x, w)
    assert_same_on_both(lambda x, w: det_finalize(det_gemm_partial(x, w), denominator=7), x, w)
    assert_same_on_both(lambda x, w: det_finalize(det_gemm_partial(x, w), denominator=3 * 2**40), x[:4], w[:4])
    assert_same_on_both(lambda x, w: normalise_digits(det_combine([det_gemm_partial(x, w)] * 3)), x, w)


@pytest.mark.parametrize("size", [0, 1])
def test_empty_products(size):
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        assert_same_on_both(det_gemm, tensor(m, k), tensor(n, k), *([tensor(n)] if size else []))


def test_digits_are_added_in_place_also_through_strides():
    def run(x, w):
        digits = zero_digits((40, 2, 50), device=x.device)
        add_gemm_digits(digits[:, 1], x, w)
        add_sum_digits(digits[0, 0], w.t(), dim=0)
        return normalise_digits(digits)

    assert_same_on_both(run, tensor(40, 300), tensor(50, 300, seed=1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2)])
def test_sums(dim, dtype):
    for special in (False, True):
        x = tensor(12, 70, 33, special=special).to(dtype)
        assert_same_on_both(lambda x: det_sum(x, dim), x)
        assert_same_on_both(lambda x: det_sum(x, dim, keepdim=True, dtype=torch.float32), x)
        assert_same_on_both(lambda x: det_sum_partial(x, dim), x)
        assert_same_on_both(lambda x: det_sum(x.transpose(0, 2), dim), x)
    assert_same_on_both(sum_of_squares_partial, tensor(999).to(dtype))


def test_inner_products():
    dot = pytest.importorskip("det_lightning.ops.dot")
    assert_same_on_both(dot.det_dot, tensor(5, 700, special=True), tensor(5, 700, seed=1))
    assert_same_on_both(dot.det_mean, tensor(70, 30))
    assert_same_on_both(lambda x: dot.det_sum_of_squares(x, 1), tensor(70, 300))


def test_elementary_functions_and_relu():
    for x in (tensor(1000, special=True), tensor(30, 40)[1:, 1:], tensor(30, 40).t()):
        assert_same_on_both(det_exp, x)
        assert_same_on_both(det_log, x)
        assert_same_on_both(relu, x)


def test_a_linear_layer_forward_and_backward():
    def run(x, weight, bias):
        x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
        y = relu(linear(x, weight, bias))
        y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float64)).float().to(y.device).view_as(y))
        return y.detach(), x.grad, weight.grad, bias.grad

    assert_same_on_both(run, tensor(6, 20, 300), tensor(64, 300, seed=1), tensor(64, seed=2))


def test_cross_entropy_and_the_exact_mean():
    def run(logits, target):
        logits = logits.detach().clone().requires_grad_()
        loss = exact_mean(cross_entropy_items(logits, target))
        loss.backward()
        return loss.detach(), logits.grad

    assert_same_on_both(run, tensor(64, 1000), torch.arange(64) * 7)


@pytest.mark.parametrize(
    "dtype",
    [
        *FLOATS,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.complex64,
    ],
)
def test_digest_lanes(dtype):
    x = (tensor(37, 53, special=dtype.is_floating_point) * 50).to(dtype)
    for view in (x, x.t(), x[1:, 1:], x[:0], x[3, 4]):
        assert tensor_lanes(view.to(DEVICE)) == tensor_lanes(view)
        assert tensor_lanes(x.to(DEVICE).t()) == tensor_lanes(x.t())


def test_tensors_on_two_devices_are_refused_by_name():
    with pytest.raises(InputError, match=r"several devices \(cpu, cuda:0\)"):
        det_gemm(tensor(3, 4), tensor(5, 4).to(DEVICE))


def test_a_family_without_cuda_kernels_is_refused():
    from det_lightning.kernels.dispatch import kernels_of

    with pytest.raises(InputError, match="no CUDA kernels for nothing"):
        kernels_of("nothing").work(tensor(3).to(DEVICE))
