"""How products are called: batches, strides, tiles, streams, graphs. None of it can be seen in a bit."""

import pytest

from det_lightning.arithmetic.formats import FLOAT32, NB

torch = pytest.importorskip("torch")

from det_lightning.errors import InputError  # noqa: E402
from det_lightning.kernels import cuda_gemm, cuda_planner, cuda_reduction  # noqa: E402
from det_lightning.kernels.cpu import reduction  # noqa: E402
from det_lightning.ops.gemm import det_gemm, det_gemm_partial  # noqa: E402
from det_lightning.ops.matmul import det_matmul  # noqa: E402

from .conftest import DEVICE, to_bits  # noqa: E402
from .test_products_on_gpu import (  # noqa: E402
    WAYS,
    any_finite,
    assert_same,
    expected,
    normal,
    numbers,
    on_gpu,
    outliers,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]


def test_what_earlier_calls_left_in_memory_cannot_be_seen():
    rng = numbers(20)
    x, w = normal(rng, FLOAT32, (131, 333)), normal(rng, FLOAT32, (65, 333))
    wanted = expected(x, w, None, FLOAT32)
    for path in WAYS:
        torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=DEVICE)
        assert_same(on_gpu(x, w, None, FLOAT32, path=path), wanted)
    x, w = x[:, :45], w[:, :45]
    torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=DEVICE)
    assert_same(on_gpu(x, w, None, FLOAT32, path="short"), expected(x, w, None, FLOAT32))


def test_tiles_of_a_small_workspace_cannot_be_seen():
    rng = numbers(7)
    x, w, bias = normal(rng, FLOAT32, (700, 400)), normal(rng, FLOAT32, (1100, 400)), normal(rng, FLOAT32, (1100,))
    wanted = expected(x, w, bias, FLOAT32)
    for workspace_bytes in (1, 3 << 20, 10 << 20):
        for path in WAYS:
            assert_same(on_gpu(x, w, bias, FLOAT32, workspace_bytes=workspace_bytes, path=path), wanted)
    x, w = x[:, :70], w[:, :70]
    wanted = expected(x, w, None, FLOAT32)
    for workspace_bytes in (1, 300_000, 3 << 20):
        assert_same(on_gpu(x, w, None, FLOAT32, workspace_bytes=workspace_bytes, path="short"), wanted)


def test_parts_of_very_many_terms_cannot_be_seen():
    rng, terms = numbers(18), 3 * (1 << 16) + 7
    x, w, bias = normal(rng, FLOAT32, (3, terms)), normal(rng, FLOAT32, (5, terms)), normal(rng, FLOAT32, (5,))
    for one_bias in (None, bias):
        found = on_gpu(x, w, one_bias, FLOAT32, workspace_bytes=1)
        assert_same(found, expected(x, w, one_bias, FLOAT32))
    digits = torch.zeros((3, 5, NB), dtype=torch.int64, device=DEVICE)
    cuda_gemm.add_gemm_digits(digits, x.to(DEVICE), w.to(DEVICE), "int8", workspace_bytes=1)
    assert torch.equal(cuda_reduction.normalise(digits).cpu(), reduction.normalise(det_gemm_partial(x, w)))


def test_batches_of_a_small_workspace_cannot_be_seen():
    rng = numbers(17)
    x, w = normal(rng, FLOAT32, (7, 150, 90)), normal(rng, FLOAT32, (7, 70, 90))
    wanted = [expected(x[b], w[b], None, FLOAT32) for b in range(7)]
    for workspace_bytes in (1, 1 << 20, 2_500_000, 1 << 30):
        for path in (*WAYS, "short"):
            found = on_gpu(x, w, None, FLOAT32, workspace_bytes=workspace_bytes, path=path)
            for b in range(7):
                assert_same(found[b], wanted[b])


def test_strides_cannot_be_seen():
    rng = numbers(8)
    base = normal(rng, FLOAT32, (301, 403))
    device = base.to(DEVICE)
    for view in (
        lambda t: t.t(), lambda t: t[1:, 1:], lambda t: t[::2, 3:], lambda t: t[:, ::3], lambda t: t[:1].expand(50, -1),
        lambda t: t[:, :1].expand(-1, 70), lambda t: torch._neg_view(t), lambda t: t.flip(0),
    ):  # fmt: skip
        wanted = expected(view(base), view(base), None, FLOAT32)
        for engine in ("int8", "float64"):
            assert_same(to_bits(cuda_gemm.gemm(view(device), view(device), None, FLOAT32, engine)), wanted)


def test_a_batch_is_its_products():
    rng = numbers(9)
    x, w = normal(rng, FLOAT32, (5, 130, 64)), normal(rng, FLOAT32, (5, 70, 64))
    for path in (None, "float64"):
        found = on_gpu(x, w, None, FLOAT32, path=path)
        for b in range(5):
            assert_same(found[b], expected(x[b], w[b], None, FLOAT32))


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


@pytest.mark.parametrize(("path", "terms"), [("steps", 300), ("whole", 300), ("short", 60), ("float64", 300)])
def test_a_product_is_captured_in_a_cuda_graph_and_replays_on_other_data(path, terms):
    engine, path = ("float64", None) if path == "float64" else ("int8", path)
    rng = numbers(11)
    x, w = normal(rng, FLOAT32, (256, terms)).to(DEVICE), normal(rng, FLOAT32, (128, terms)).to(DEVICE)
    cuda_gemm.gemm(x, w, None, FLOAT32, engine, path=path)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cuda_gemm.gemm(x, w, None, FLOAT32, engine, path=path) for _ in range(3)]
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


@pytest.mark.parametrize("path", [None, "float64"])
def test_the_planner_settles_and_never_changes_a_bit(path):
    cuda_planner._plans.clear()
    cuda_gemm._known.sites.clear()
    rng = numbers(13)
    x, w = normal(rng, FLOAT32, (256, 1024)), normal(rng, FLOAT32, (256, 1024))
    wanted, seen = expected(x, w, None, FLOAT32), []
    for _ in range(20):
        assert_same(on_gpu(x, w, None, FLOAT32, path=path), wanted)
        (plan,) = cuda_planner._plans.values()
        seen.append(plan.moduli)
    assert len(set(seen[-4:])) == 1, seen
    assert path is None or all(moduli % 3 == 0 for moduli in seen)


def test_the_engine_that_auto_is_takes_products_digits_and_nothing_else_changes(monkeypatch):
    rng = numbers(23)
    x, w = normal(rng, FLOAT32, (130, 300)).to(DEVICE), normal(rng, FLOAT32, (70, 300)).to(DEVICE)
    found = []
    for engine in ("int8", "float64"):
        monkeypatch.setattr(cuda_gemm, "engine_of", lambda index, engine=engine: engine)
        cuda_gemm._known.sites.clear()
        found.append((det_gemm(x, w), det_gemm_partial(x, w)))
        assert {site.engine for site in cuda_gemm._known.sites.values()} == {engine}
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
