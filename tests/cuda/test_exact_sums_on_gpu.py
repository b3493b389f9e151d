"""Sums, sums of squares and inner products on the GPU: the states of the CPU on data that every path meets."""

import pytest

torch = pytest.importorskip("torch")

from det_lightning.kernels import cuda_binned_sum, cuda_reduction  # noqa: E402
from det_lightning.kernels.cpu import binned_sum, reduction  # noqa: E402
from det_lightning.ops.dot import det_dot, det_mean, det_sum_of_squares  # noqa: E402

from .conftest import DEVICE  # noqa: E402
from .test_ops_on_gpu import assert_same_on_both  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_exponents(low: int, high: int, shape: tuple[int, ...], generator) -> "torch.Tensor":
    exponents = torch.randint(low, high, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def data(kind: str, rows: int, terms: int, dtype: "torch.dtype", seed: int) -> "torch.Tensor":
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, terms, generator=generator)
    if kind == "half zeros":
        x = x.relu()
    elif kind == "narrow, then elsewhere":
        x = of_exponents(-2, 2, (rows, terms), generator)
        x[:, terms // 2 :] *= 2.0**-40
    elif kind == "every exponent":
        x = of_exponents(-149, 126, (rows, terms), generator)
    elif kind == "edges of the reach":
        x = of_exponents(-14, 15, (rows, terms), generator)
    elif kind == "special":
        x.view(-1)[::97] = float("inf")
        x.view(-1)[5::89] = -float("inf")
        x.view(-1)[7::101] = float("nan")
    elif kind == "large":
        x = torch.full((rows, terms), 60000.0)
    elif kind == "zeros":
        x = torch.zeros(rows, terms) * -1
    return x.to(dtype)


KINDS = (
    "normal",
    "half zeros",
    "narrow, then elsewhere",
    "every exponent",
    "edges of the reach",
    "special",
    "large",
    "zeros",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_rows_are_the_cpus(kind, dtype):
    for rows, terms in ((3, 70_001), (50, 1), (40, 300), (5000, 40)):
        x, w = (data(kind, rows, terms, dtype, seed) for seed in (1, 2))
        for what, second in (("sum", None), ("squares", None), ("products", w)):
            found = cuda_binned_sum.sum_rows(what, x.to(DEVICE), None if second is None else second.to(DEVICE)).cpu()
            assert torch.equal(found, binned_sum.sum_rows(what, x, second)), (what, rows, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_columns_are_the_cpus(kind, dtype):
    x = data(kind, 600, 7 * 45, dtype, 3).view(600, 7, 45)
    for outer, n, inner in ((600, 7, 45), (1, 4200, 45), (24, 175, 45)):
        view = x.reshape(outer, n, inner)
        assert torch.equal(cuda_reduction.sum_states(view.to(DEVICE)).cpu(), reduction.sum_states(view))


def test_inner_products_of_two_dtypes():
    x, w = data("normal", 6, 5000, torch.float32, 1), data("every exponent", 6, 5000, torch.bfloat16, 2)
    found = cuda_binned_sum.sum_rows("products", x.to(DEVICE), w.to(DEVICE)).cpu()
    assert torch.equal(found, binned_sum.sum_rows("products", x, w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_of_one_sign_fills_every_pending_sum(dtype):
    x = data("large", 1, 3_000_017, dtype, 1)
    for what in ("sum", "squares"):
        assert torch.equal(cuda_binned_sum.sum_rows(what, x.to(DEVICE)).cpu(), binned_sum.sum_rows(what, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_inner_products_and_squares_of_any_strides(dtype):
    x = data("normal", 40, 33 * 12, dtype, 5).view(40, 33, 12)
    for view in (
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[::3, 1:, ::2],
        lambda t: t[:0],
        lambda t: t[1, 2],
    ):
        for dim in (None, 0, -1):
            assert_same_on_both(lambda x, view=view, dim=dim: det_mean(view(x), dim, dtype=torch.float32), x)
            assert_same_on_both(lambda x, view=view, dim=dim: det_sum_of_squares(view(x), dim, keepdim=True), x)
        assert_same_on_both(lambda x, view=view: det_dot(view(x), view(x).flip(-1), dtype=dtype), x)
    assert_same_on_both(lambda x: det_dot(x, x[:1, :, :]), x)
