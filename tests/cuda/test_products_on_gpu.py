"""The product on int8 tensor cores against the CPU's, byte for byte, on data made to break it."""

import os

import numpy as np
import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, NB

torch = pytest.importorskip("torch")

from det_lightning.errors import InputError  # noqa: E402
from det_lightning.kernels import cuda_gemm, cuda_paths, cuda_planner, cuda_reduction  # noqa: E402
from det_lightning.kernels.cpu import gemm as cpu_gemm  # noqa: E402
from det_lightning.kernels.cpu import reduction as cpu_reduction  # noqa: E402
from det_lightning.ops.matmul import det_matmul  # noqa: E402

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


def expected(x, w, bias, form) -> np.ndarray:
    return to_bits(cpu_gemm.gemm(x, w, bias, form, "auto"))


def on_gpu(x, w, bias, form, **how) -> np.ndarray:
    x, w = x.to(DEVICE), w.to(DEVICE)
    bias = None if bias is None else bias.to(DEVICE)
    return to_bits(cuda_gemm.gemm(x, w, bias, form, how.pop("engine", "int8"), **how))


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    differ = np.argwhere(found != wanted)
    if len(differ):
        place = tuple(differ[0])
        pytest.fail(
            f"{len(differ)} of {found.size} differ, first at {place}: {found[place]:#x}, not {wanted[place]:#x}"
        )


def paths_for(terms: int, bias) -> tuple[str, ...]:
    return ("steps", "whole", "short") if terms <= 128 and bias is None else ("steps", "whole")


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
    for path in ("steps", "whole"):
        assert_same(on_gpu(x, w, bias, out_form, path=path), wanted)
    for depth in (50, 64, 101):
        short_x, short_w = x[:, :depth], w[:, :depth]
        assert_same(on_gpu(short_x, short_w, None, out_form, path="short"), expected(short_x, short_w, None, out_form))


@pytest.mark.parametrize("moduli", range(4, 17))
def test_the_number_of_moduli_cannot_be_seen(moduli):
    rng = numbers(3)
    x, w, bias = normal(rng, FLOAT32, (150, 700)), normal(rng, FLOAT32, (260, 700)), normal(rng, FLOAT32, (260,))
    for path in ("steps", "whole"):
        assert_same(on_gpu(x, w, bias, FLOAT32, moduli=moduli, path=path), expected(x, w, bias, FLOAT32))
        assert_same(on_gpu(x, w, bias, BFLOAT16, moduli=moduli, path=path), expected(x, w, bias, BFLOAT16))
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


@pytest.mark.parametrize(("path", "terms"), [("steps", 512), ("short", 64), ("short", 128)])
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
    assert_same(on_gpu(x, x, None, FLOAT32, path="whole"), expected(x, x, None, FLOAT32))
    x, w = normal(rng, FLOAT32, (5, 140_001)), normal(rng, FLOAT32, (4, 140_001))
    assert_same(on_gpu(x, w, None, FLOAT32, path=path), expected(x, w, None, FLOAT32))
    cuda_gemm._known.sites.clear()


def test_what_earlier_calls_left_in_memory_cannot_be_seen():
    rng = numbers(20)
    x, w = normal(rng, FLOAT32, (131, 333)), normal(rng, FLOAT32, (65, 333))
    wanted = expected(x, w, None, FLOAT32)
    for path in ("steps", "whole"):
        torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=DEVICE)
        assert_same(on_gpu(x, w, None, FLOAT32, path=path), wanted)
    x, w = x[:, :45], w[:, :45]
    torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=DEVICE)
    assert_same(on_gpu(x, w, None, FLOAT32, path="short"), expected(x, w, None, FLOAT32))


def test_an_odd_depth_beyond_what_32_bits_add_up():
    rng = numbers(21)
    x, w = normal(rng, FLOAT32, (1, 131_073)), normal(rng, FLOAT32, (37, 131_073))
    for path in ("steps", "whole"):
        assert_same(on_gpu(x, w, None, FLOAT32, path=path), expected(x, w, None, FLOAT32))
        assert_same(on_gpu(w, x, None, BFLOAT16, path=path), expected(w, x, None, BFLOAT16))


def test_tiles_of_a_small_workspace_cannot_be_seen():
    rng = numbers(7)
    x, w, bias = normal(rng, FLOAT32, (700, 400)), normal(rng, FLOAT32, (1100, 400)), normal(rng, FLOAT32, (1100,))
    wanted = expected(x, w, bias, FLOAT32)
    for workspace_bytes in (1, 3 << 20, 10 << 20):
        for path in ("steps", "whole"):
            assert_same(on_gpu(x, w, bias, FLOAT32, workspace_bytes=workspace_bytes, path=path), wanted)
    x, w = x[:, :70], w[:, :70]
    wanted = expected(x, w, None, FLOAT32)
    for workspace_bytes in (1, 300_000, 3 << 20):
        assert_same(on_gpu(x, w, None, FLOAT32, workspace_bytes=workspace_bytes, path="short"), wanted)


def test_batches_of_a_small_workspace_cannot_be_seen():
    rng = numbers(17)
    x, w = normal(rng, FLOAT32, (7, 150, 90)), normal(rng, FLOAT32, (7, 70, 90))
    wanted = [expected(x[b], w[b], None, FLOAT32) for b in range(7)]
    for workspace_bytes in (1, 1 << 20, 2_500_000, 1 << 30):
        for path in ("steps", "whole", "short"):
            found = cuda_gemm.gemm(
                x.to(DEVICE), w.to(DEVICE), None, FLOAT32, "int8", workspace_bytes=workspace_bytes, path=path
            )
            for b in range(7):
                assert_same(to_bits(found[b]), wanted[b])


def test_strides_cannot_be_seen():
    rng = numbers(8)
    base = normal(rng, FLOAT32, (301, 403))
    device = base.to(DEVICE)
    for view in (
        lambda t: t.t(), lambda t: t[1:, 1:], lambda t: t[::2, 3:], lambda t: t[:, ::3], lambda t: t[:1].expand(50, -1),
        lambda t: t[:, :1].expand(-1, 70), lambda t: torch._neg_view(t), lambda t: t.flip(0),
    ):  # fmt: skip
        x = view(base)
        found = cuda_gemm.gemm(view(device), view(device), None, FLOAT32, "int8")
        assert_same(to_bits(found), expected(x, x, None, FLOAT32))


def test_a_batch_is_its_products():
    rng = numbers(9)
    x, w = normal(rng, FLOAT32, (5, 130, 64)), normal(rng, FLOAT32, (5, 70, 64))
    found = cuda_gemm.gemm(x.to(DEVICE), w.to(DEVICE), None, FLOAT32, "int8")
    for b in range(5):
        assert_same(to_bits(found[b]), expected(x[b], w[b], None, FLOAT32))


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 40, 64), (3, 64, 50)), ((2, 3, 33, 20), (3, 20, 17)), ((5, 1, 70), (70, 9)), ((2, 200, 100), (100,)),
     ((4, 1, 9, 65), (1, 3, 65, 8)), ((0, 4, 3), (0, 3, 2)), ((2, 4, 0), (2, 0, 3))],
)  # fmt: skip
def test_matmul_of_batches_and_its_gradients_equal_those_of_the_cpu(a, b):
    rng = numbers(22)
    a, b = normal(rng, FLOAT32, a), normal(rng, FLOAT32, b)
    results = []
    for device in ("cpu", DEVICE):
        x, y = (t.clone().to(device).requires_grad_() for t in (a, b))
        out = det_matmul(x, y)
        other_strides = y.detach().mT.contiguous().mT if y.dim() > 1 else y.detach()
        assert torch.equal(out.detach(), det_matmul(x.detach(), other_strides))
        out.backward(torch.ones_like(out).cumsum(0))
        results.append([t.detach().cpu() for t in (out, x.grad, y.grad)])
    # The gradient of what was broadcast is torch's own sum of exact products.
    broadcast = a.shape[:-2] != b.shape[:-2] and b.dim() > 2
    for one, other in list(zip(*results, strict=True))[: 1 if broadcast else 3]:
        assert to_bits(one).tobytes() == to_bits(other).tobytes()


def test_matmul_refuses_on_the_gpu_what_it_refuses_on_the_cpu():
    x = torch.zeros(2, 3, 4, device=DEVICE)
    for call in (
        lambda: det_matmul(x, x), lambda: det_matmul(x, x.mT, engine="abacus"), lambda: det_matmul(x.double(), x),
        lambda: det_matmul(x, torch.zeros(3, 4, 2, device=DEVICE)), lambda: det_matmul(x, torch.zeros(2, 4, 3)),
    ):  # fmt: skip
        with pytest.raises(InputError):
            call()


@pytest.mark.parametrize("moduli", [None, 8, 16])
@pytest.mark.parametrize("data", DATA)
def test_digits_of_products_equal_those_of_the_cpu(data, moduli):
    rng = numbers(10)
    x, w = DATA[data](rng, FLOAT32, (140, 300)), DATA[data](rng, FLOAT32, (60, 300))
    found = torch.zeros((140, 60, NB), dtype=torch.int64, device=DEVICE)
    wanted = torch.zeros((140, 60, NB), dtype=torch.int64)
    for _ in range(2):
        cuda_gemm.add_gemm_digits(found, x.to(DEVICE), w.to(DEVICE), "int8", moduli=moduli, workspace_bytes=1 << 20)
        cpu_gemm.add_gemm_digits(wanted, x, w, "auto")
    found = cuda_reduction.normalise(found).cpu()
    assert found.numpy().tobytes() == cpu_reduction.normalise(wanted).numpy().tobytes()


@pytest.mark.parametrize(("path", "terms"), [("steps", 300), ("whole", 300), ("short", 60)])
def test_a_product_is_captured_in_a_cuda_graph_and_replays_on_other_data(path, terms):
    rng = numbers(11)
    x, w = normal(rng, FLOAT32, (256, terms)).to(DEVICE), normal(rng, FLOAT32, (128, terms)).to(DEVICE)
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path=path)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path=path) for _ in range(3)]
    for data in (normal, outliers, any_finite):
        x.copy_(data(rng, FLOAT32, (256, terms)))
        for _ in range(2):
            graph.replay()
        wanted = expected(x.cpu(), w.cpu(), None, FLOAT32)
        for out in outs:
            assert_same(to_bits(out), wanted)


def test_products_on_two_streams_and_in_a_graph_do_not_share_a_barrier():
    rng = numbers(18)
    x, w = normal(rng, FLOAT32, (256, 500)).to(DEVICE), normal(rng, FLOAT32, (200, 500)).to(DEVICE)
    wanted = expected(x.cpu(), w.cpu(), None, FLOAT32)
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="whole")
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        captured = cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="whole")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            if turn % 3 == 0:
                graph.replay()
            else:
                found.append(cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="whole"))
    torch.cuda.synchronize()
    for out in (*found, captured):
        assert_same(to_bits(out), wanted)


def test_when_the_barriers_for_captured_products_are_used_up_others_kernels_take_over(monkeypatch):
    rng = numbers(19)
    x, w = normal(rng, FLOAT32, (100, 300)).to(DEVICE), normal(rng, FLOAT32, (90, 300)).to(DEVICE)
    monkeypatch.setattr(cuda_gemm, "_captured_barriers", iter(range(cuda_gemm._BARRIERS, cuda_gemm._BARRIERS + 5)))
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="whole")
    cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="steps")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_gemm.gemm(x, w, None, FLOAT32, "int8", path="whole")
    graph.replay()
    assert_same(to_bits(out), expected(x.cpu(), w.cpu(), None, FLOAT32))


def test_another_stream_is_followed():
    rng = numbers(12)
    x, w = normal(rng, FLOAT32, (512, 2000)), normal(rng, FLOAT32, (512, 2000))
    wanted = expected(x, w, None, FLOAT32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = cuda_gemm.gemm(x.to(DEVICE, non_blocking=True), w.to(DEVICE, non_blocking=True), None, FLOAT32, "int8")
    stream.synchronize()
    assert_same(to_bits(found), wanted)


def test_the_planner_settles_and_never_changes_a_bit():
    cuda_planner.forget()
    rng = numbers(13)
    x, w = normal(rng, FLOAT32, (256, 1024)), normal(rng, FLOAT32, (256, 1024))
    wanted, seen = expected(x, w, None, FLOAT32), []
    for _ in range(20):
        assert_same(on_gpu(x, w, None, FLOAT32), wanted)
        seen.append(next(iter(cuda_planner._plans.values())).moduli)
    assert len(set(seen[-4:])) == 1, seen


def test_the_vendor_product_fails_the_same_comparison():
    rng = numbers(14)
    x, w = normal(rng, FLOAT32, (256, 1024)), normal(rng, FLOAT32, (256, 1024))
    vendor = to_bits(x.to(DEVICE) @ w.to(DEVICE).t())
    assert (vendor != expected(x, w, None, FLOAT32)).mean() > 0.1
