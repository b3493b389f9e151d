"""The product on tensor cores against the CPU's, byte for byte, on data made to break it."""

import os

import numpy as np
import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, NB

torch = pytest.importorskip("torch")

from det_lightning.kernels import cuda_gemm, cuda_paths, cuda_reduction  # noqa: E402
from det_lightning.kernels.cpu import gemm as cpu_gemm  # noqa: E402
from det_lightning.kernels.cpu import reduction as cpu_reduction  # noqa: E402

from .conftest import BITS, DEVICE, from_bits, to_bits  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]

FORMATS = (FLOAT32, BFLOAT16, FLOAT16)


def numbers(seed: int) -> np.random.Generator:
    """Random numbers, others with another DET_LIGHTNING_TEST_SEED in the environment."""
    return np.random.default_rng((int(os.environ.get("DET_LIGHTNING_TEST_SEED", "0")), seed))


def name_of(form) -> str:
    return form.name


def normal(rng, form, shape) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(
        from_bits(np.zeros(1, BITS[form]), form).dtype
    )


def any_finite(rng, form, shape) -> torch.Tensor:
    """Patterns over the whole range of exponents: rows far wider than the moduli hold."""
    bits = rng.integers(0, form.infinity_bits, shape) | rng.integers(0, 2, shape) * form.sign_bit
    return from_bits(bits.astype(BITS[form]), form)


def with_specials(rng, form, shape) -> torch.Tensor:
    x = normal(rng, form, shape)
    flat = x.view(-1)
    for value in (float("inf"), float("-inf"), float("nan"), 0.0, -0.0):
        flat[rng.integers(0, flat.numel(), 2)] = value
    x[0] = 0
    return x


def subnormal(rng, form, shape) -> torch.Tensor:
    bits = rng.integers(0, 1 << form.fraction_bits, shape) | rng.integers(0, 2, shape) * form.sign_bit
    return from_bits(bits.astype(BITS[form]), form)


def outliers(rng, form, shape) -> torch.Tensor:
    x = normal(rng, form, shape)
    x[torch.arange(shape[0]), torch.from_numpy(rng.integers(0, shape[1], shape[0]))] *= 2.0**12
    return x


def cancelling(rng, form, shape) -> torch.Tensor:
    """Each row holds every value twice, with both signs, but for one tiny term."""
    half = normal(rng, form, (shape[0], shape[1] // 2))
    x = torch.cat([half, -half, normal(rng, form, (shape[0], shape[1] % 2))], dim=1)
    x[:, -1] = 2.0**-14
    return x


def softmax_minus_one_hot(rng, form, shape) -> torch.Tensor:
    x = torch.softmax(normal(rng, FLOAT32, shape), dim=1)
    x[torch.arange(shape[0]), torch.from_numpy(rng.integers(0, shape[1], shape[0]))] -= 1
    return x.to(normal(rng, form, (1,)).dtype)


DATA = {
    f.__name__: f for f in (normal, any_finite, with_specials, subnormal, outliers, cancelling, softmax_minus_one_hot)
}
SHAPES = [
    (1, 1, 1), (7, 64, 5), (128, 128, 256), (65, 300, 47), (200, 1000, 130), (129, 257, 300), (40, 2500, 33), (1, 5000, 257),
    (300, 1, 41), (3, 65, 129),
]  # fmt: skip


WAYS = ("steps", "whole", "float64")
"""That take any product."""


def expected(x, w, bias, form) -> np.ndarray:
    return to_bits(cpu_gemm.gemm(x, w, bias, form, "auto"))


def on_gpu(x, w, bias, form, path=None, **how) -> np.ndarray:
    """Bits of the product by a path of the int8 engine, or by the "float64" engine."""
    x, w = x.to(DEVICE), w.to(DEVICE)
    bias = None if bias is None else bias.to(DEVICE)
    engine, path = ("float64", None) if path == "float64" else ("int8", path)
    return to_bits(cuda_gemm.gemm(x, w, bias, form, engine, path=path, **how))


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    differ = np.argwhere(found != wanted)
    if len(differ):
        place = tuple(differ[0])
        pytest.fail(
            f"{len(differ)} of {found.size} differ, first at {place}: {found[place]:#x}, not {wanted[place]:#x}"
        )


def paths_for(terms: int, bias) -> tuple[str, ...]:
    return (*WAYS, "short") if terms <= 128 and bias is None else WAYS


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_products_equal_those_of_the_cpu(data, shape):
    rng = numbers(1)
    m, k, n = shape
    x, w = DATA[data](rng, FLOAT32, (m, k)), DATA[data](rng, FLOAT32, (n, k))
    bias = normal(rng, FLOAT32, (n,))
    for one_bias in (None, bias):
        wanted = expected(x, w, one_bias, FLOAT32)
        for path in paths_for(k, one_bias):
            for moduli in (None, 6, 9, 12, 16):
                assert_same(on_gpu(x, w, one_bias, FLOAT32, moduli=moduli, path=path), wanted)


@pytest.mark.parametrize("out_form", FORMATS, ids=name_of)
@pytest.mark.parametrize("w_form", FORMATS, ids=name_of)
@pytest.mark.parametrize("x_form", FORMATS, ids=name_of)
@pytest.mark.parametrize("data", ["normal", "any_finite", "with_specials"])
def test_every_pair_of_formats_rounds_once_to_every_format(data, x_form, w_form, out_form):
    rng = numbers(2)
    x, w = DATA[data](rng, x_form, (70, 200)), DATA[data](rng, w_form, (90, 200))
    bias = any_finite(rng, x_form, (90,))
    wanted = expected(x, w, bias, out_form)
    for path in WAYS:
        assert_same(on_gpu(x, w, bias, out_form, path=path), wanted)
    for depth in (50, 64, 101):
        short_x, short_w = x[:, :depth], w[:, :depth]
        assert_same(on_gpu(short_x, short_w, None, out_form, path="short"), expected(short_x, short_w, None, out_form))


@pytest.mark.parametrize("moduli", range(4, 17))
def test_the_number_of_moduli_cannot_be_seen(moduli):
    rng = numbers(3)
    x, w, bias = normal(rng, FLOAT32, (150, 700)), normal(rng, FLOAT32, (260, 700)), normal(rng, FLOAT32, (260,))
    wanted = {form: expected(x, w, bias, form) for form in (FLOAT32, BFLOAT16)}
    for path in WAYS:
        for form, bits in wanted.items():
            assert_same(on_gpu(x, w, bias, form, moduli=moduli, path=path), bits)
    for depth in (64, 128):
        short_x, short_w = x[:, :depth], w[:, :depth]
        wanted = expected(short_x, short_w, None, FLOAT32)
        assert_same(on_gpu(short_x, short_w, None, FLOAT32, moduli=moduli, path="short"), wanted)


@pytest.fixture
def without_fallback(monkeypatch):
    """Products leave out the kernel for what the others left undecided."""

    class Shortened(cuda_paths.Chain):
        def __init__(self, index, calls, *more):
            super().__init__(index, [call for call in calls if not call.kernel.endswith("_flagged")], *more)

    monkeypatch.setattr(cuda_paths, "Chain", Shortened)
    cuda_gemm._known.sites.clear()
    yield
    cuda_gemm._known.sites.clear()


@pytest.mark.parametrize(("path", "terms"), [("steps", 512), ("short", 64), ("short", 128), ("float64", 512)])
def test_a_guess_that_is_too_small_is_found_out_on_the_device(path, terms, request):
    rng = numbers(4)
    x, w = normal(rng, FLOAT32, (128, terms)), normal(rng, FLOAT32, (128, terms))
    wanted = expected(x, w, None, FLOAT32)
    assert_same(on_gpu(x, w, None, FLOAT32, moduli=6, path=path), wanted)
    # The negative control: without the kernel for what was left undecided, bits are wrong.
    request.getfixturevalue("without_fallback")
    assert (on_gpu(x, w, None, FLOAT32, moduli=6, path=path) != wanted).mean() > 0.01


@pytest.mark.parametrize("data", DATA)
def test_batches_of_short_rows_equal_their_products(data):
    rng = numbers(15)
    for batches, m, k, n in ((3, 130, 64, 200), (2, 257, 128, 129), (5, 40, 33, 65)):
        x, w = DATA[data](rng, FLOAT32, (batches * m, k)), DATA[data](rng, FLOAT32, (batches * n, k))
        x, w = x.view(batches, m, k), w.view(batches, n, k)
        x[1, 5:9], w[0, 7:40] = 0, 0
        for form in (FLOAT32, BFLOAT16):
            found = cuda_gemm.gemm(x.to(DEVICE), w.to(DEVICE), None, form, "int8", path="short")
            for b in range(batches):
                assert_same(to_bits(found[b]), expected(x[b], w[b], None, form))


def test_short_rows_whose_list_of_undecided_elements_overflows(monkeypatch):
    monkeypatch.setattr(cuda_paths, "LIST_SIZE", 100)
    rng = numbers(16)
    x, w = normal(rng, FLOAT32, (300, 60)), normal(rng, FLOAT32, (310, 60))
    for path in ("short", "steps"):
        found = cuda_gemm.gemm(
            x.to(DEVICE), w.to(DEVICE), None, FLOAT32, "int8", path=path, moduli=6, workspace_bytes=(1 << 30) - 1
        )
        assert_same(to_bits(found), expected(x, w, None, FLOAT32))


def test_ties_and_their_neighbours_round_as_the_contract_says():
    # 2^24 + 1 is a tie in float32; 2^-298 more, or less, decides it, and no number of moduli holds both.
    one = 0x3F800000
    rows = np.array([[0x4B800000, one, 1], [0x4B800000, one, 0x80000001], [0x4B800000, one, 0]], np.uint32)
    x, w = from_bits(rows, FLOAT32), from_bits(np.array([[one, one, 1]], np.uint32), FLOAT32)
    for moduli in (None, 4, 9, 16):
        assert on_gpu(x, w, None, FLOAT32, moduli=moduli)[:, 0].tolist() == [0x4B800001, 0x4B800000, 0x4B800000]
    # A bias as the deciding term.
    x, w = from_bits(rows[2:, :2], FLOAT32), from_bits(np.array([[one, one]] * 3, np.uint32), FLOAT32)
    bias = from_bits(np.array([1, 0x80000001, 0], np.uint32), FLOAT32)
    for moduli in (None, 4, 9, 16):
        assert on_gpu(x, w, bias, FLOAT32, moduli=moduli)[0].tolist() == [0x4B800001, 0x4B800000, 0x4B800000]


@pytest.mark.parametrize("kernel", ["hopper, 128 columns", "hopper, 256 columns", "any device"])
def test_the_kernels_of_the_integer_product_agree(monkeypatch, kernel):
    cuda_gemm._known.sites.clear()
    if kernel == "any device":
        monkeypatch.setattr(cuda_paths, "capability", lambda index: (8, 0))
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    else:
        monkeypatch.setattr(cuda_paths, "_tile_columns", lambda *_: 256 if "256" in kernel else 128)
    rng = numbers(5)
    for m, k, n in ((300, 1500, 700), (64, 100, 1000), (1000, 129, 40)):
        x, w = normal(rng, FLOAT32, (m, k)), normal(rng, FLOAT32, (n, k))
        assert_same(on_gpu(x, w, None, FLOAT32, path="steps"), expected(x, w, None, FLOAT32))
    cuda_gemm._known.sites.clear()


@pytest.mark.parametrize("portable", [False, True])
def test_sums_longer_than_32_bits_hold_are_reduced_on_the_way(monkeypatch, portable):
    cuda_gemm._known.sites.clear()
    path = "steps" if portable else None
    if portable:
        monkeypatch.setattr(cuda_paths, "capability", lambda index: (8, 0))
    rng = numbers(6)
    # Residues near their ends, all of one sign: 32 bits overflow after 131 071 terms.
    x = torch.full((3, 200_000), -127.0)
    x += torch.from_numpy(rng.integers(-1, 1, x.shape).astype(np.float32))
    assert_same(on_gpu(x, x, None, FLOAT32, path=path), expected(x, x, None, FLOAT32))
    for other in ("whole", "float64"):
        assert_same(on_gpu(x, x, None, FLOAT32, path=other), expected(x, x, None, FLOAT32))
    x, w = normal(rng, FLOAT32, (5, 140_001)), normal(rng, FLOAT32, (4, 140_001))
    assert_same(on_gpu(x, w, None, FLOAT32, path=path), expected(x, w, None, FLOAT32))
    cuda_gemm._known.sites.clear()


def test_an_odd_depth_beyond_what_32_bits_add_up():
    rng = numbers(21)
    x, w = normal(rng, FLOAT32, (1, 131_073)), normal(rng, FLOAT32, (37, 131_073))
    one, other = expected(x, w, None, FLOAT32), expected(w, x, None, BFLOAT16)
    for path in WAYS:
        assert_same(on_gpu(x, w, None, FLOAT32, path=path), one)
        assert_same(on_gpu(w, x, None, BFLOAT16, path=path), other)


@pytest.mark.parametrize("engine", ["int8", "float64"])
@pytest.mark.parametrize("moduli", [None, 8, 16])
@pytest.mark.parametrize("data", DATA)
def test_digits_of_products_equal_those_of_the_cpu(data, moduli, engine):
    rng = numbers(10)
    x, w = DATA[data](rng, FLOAT32, (140, 300)), DATA[data](rng, FLOAT32, (60, 300))
    found = torch.zeros((140, 60, NB), dtype=torch.int64, device=DEVICE)
    wanted = torch.zeros((140, 60, NB), dtype=torch.int64)
    for _ in range(2):
        cuda_gemm.add_gemm_digits(found, x.to(DEVICE), w.to(DEVICE), engine, moduli=moduli, workspace_bytes=1 << 20)
        cpu_gemm.add_gemm_digits(wanted, x, w, "auto")
    found = cuda_reduction.normalise(found).cpu()
    assert found.numpy().tobytes() == cpu_reduction.normalise(wanted).numpy().tobytes()


def test_the_vendor_product_fails_the_same_comparison():
    rng = numbers(14)
    x, w = normal(rng, FLOAT32, (256, 1024)), normal(rng, FLOAT32, (256, 1024))
    vendor = to_bits(x.to(DEVICE) @ w.to(DEVICE).t())
    assert (vendor != expected(x, w, None, FLOAT32)).mean() > 0.1
