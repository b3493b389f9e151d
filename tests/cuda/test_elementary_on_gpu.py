"""exp and log on the GPU against the CPU's, which are proved on all inputs, byte for byte."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.formats import FLOAT32  # noqa: E402
from det_lightning.kernels import cuda_elementary  # noqa: E402
from det_lightning.kernels.cpu import elementary as cpu_elementary  # noqa: E402

from .conftest import DEVICE, from_bits, to_bits  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]

EDGES = [0, 1, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x42B17217, 0x42B17218, 0x42CFF1B4, 0x7F7FFFFF,
         0x7F800000, 0x7F800001, 0x7FC12345]  # fmt: skip


def patterns(rng, count) -> np.ndarray:
    bits = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
    common = (rng.standard_normal(count // 2) * rng.choice([1e-3, 1, 20, 60], count // 2)).astype(np.float32)
    bits[: count // 2] = common.view(np.uint32)
    bits[count // 2 : count // 2 + 2 * len(EDGES)] = EDGES + [edge | 1 << 31 for edge in EDGES]
    return bits


@pytest.mark.parametrize("only_pairs", [False, True])
@pytest.mark.parametrize("name", ["exp", "log"])
def test_the_function_equals_the_cpus(name, only_pairs):
    x = from_bits(patterns(np.random.default_rng(1), 400_003), FLOAT32)
    found = to_bits(cuda_elementary.elementwise(name, x.to(DEVICE), only_pairs=only_pairs))
    wanted = to_bits(cpu_elementary.elementwise(name, x))
    assert (found != wanted).sum() == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["exp", "log"])
def test_the_function_equals_the_cpus_on_all_inputs(name):
    step = 1 << 27
    for first in range(0, 1 << 32, step):
        x = torch.arange(first, first + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        found = cuda_elementary.elementwise(name, x.to(DEVICE)).cpu()
        wanted = cpu_elementary.elementwise(name, x)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), hex(first)


def test_the_vendors_function_fails_the_same_comparison():
    x = from_bits(patterns(np.random.default_rng(1), 400_000), FLOAT32)
    vendor = to_bits(torch.exp(x.to(DEVICE)))
    wanted = to_bits(cpu_elementary.elementwise("exp", x))
    assert (vendor != wanted).sum() > 1000


def test_views_are_read_where_they_lie():
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((301, 203)).astype(np.float32))
    for view in (lambda t: t.t(), lambda t: t[1:, 1:], lambda t: torch._neg_view(t), lambda t: t[:0]):
        found = cuda_elementary.elementwise("exp", view(x.to(DEVICE)))
        assert to_bits(found).tobytes() == to_bits(cpu_elementary.elementwise("exp", view(x))).tobytes()
