"""The functions of one variable on the GPU, byte for byte the CPU's; the exhaustive tests take all 2^32 inputs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.elementary import DERIVATIVES, FUNCTIONS  # noqa: E402
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32  # noqa: E402
from det_lightning.kernels import cuda_elementary  # noqa: E402
from det_lightning.kernels.cpu import elementary as cpu_elementary  # noqa: E402
from tests.ops.elementary_reference import count_faults  # noqa: E402
from tests.ops.test_elementary import EDGES  # noqa: E402

from .conftest import DEVICE, DTYPES, from_bits, to_bits  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]
every = pytest.mark.parametrize("name", FUNCTIONS)


def numbers(count: int, seed: int = 1) -> "torch.Tensor":
    """Patterns of every kind on the CPU: common numbers, all exponents, edges, NaNs."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
    common = (rng.standard_normal(count // 2) * rng.choice([1e-3, 1, 20, 60], count // 2)).astype(np.float32)
    bits[: count // 2] = common.view(np.uint32)
    bits[count // 2 : count // 2 + 2 * len(EDGES)] = EDGES + [edge | 1 << 31 for edge in EDGES]
    return from_bits(bits, FLOAT32)


def differing(found: "torch.Tensor", wanted: "torch.Tensor") -> int:
    return int((to_bits(found) != to_bits(wanted)).sum())


@every
@pytest.mark.parametrize("only_pairs", [False, True])
def test_the_function_equals_the_cpus(name, only_pairs):
    x = numbers(400_003)
    found = cuda_elementary.elementwise(name, x.to(DEVICE), only_pairs=only_pairs)
    assert differing(found, cpu_elementary.elementwise(name, x)) == 0


@every
@pytest.mark.parametrize("form", [BFLOAT16, FLOAT16], ids=lambda form: form.name)
def test_narrow_formats_in_and_out_equal_the_cpus(name, form):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(DTYPES[form])
    found = cuda_elementary.elementwise(name, x.to(DEVICE), form)
    assert differing(found, cpu_elementary.elementwise(name, x, form)) == 0
    x = numbers(20_001)
    for only_pairs in (False, True):
        found = cuda_elementary.elementwise(name, x.to(DEVICE), form, only_pairs=only_pairs)
        assert differing(found, cpu_elementary.elementwise(name, x, form)) == 0


@pytest.mark.parametrize("name", sorted(set(DERIVATIVES.values())))
@pytest.mark.parametrize("form", DTYPES, ids=lambda form: form.name)
def test_the_gradient_equals_the_cpus(name, form):
    x, g = numbers(30_001).to(DTYPES[form]), numbers(30_001, seed=2).to(DTYPES[form])
    found = cuda_elementary.gradient(name, g.to(DEVICE), x.to(DEVICE), form)
    assert differing(found, cpu_elementary.gradient(name, g, x, form)) == 0


@pytest.mark.exhaustive
@every
def test_the_function_is_the_nearest_float_on_all_inputs(name):
    """By the float64 functions of the device and, near ties, the definition on integers."""
    step, asked = 1 << 26, 0
    for first in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(first, first + step, dtype=torch.int32, device=DEVICE).view(torch.float32)
        faults, more = count_faults(name, x, cuda_elementary.elementwise(name, x))
        assert faults == 0, hex(first & 0xFFFFFFFF)
        asked += more
    assert asked > 50, "the search has found nothing to ask the definition for"


@pytest.mark.exhaustive
@every
def test_the_function_equals_the_cpus_on_all_inputs(name):
    step = 1 << 24
    for first in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(first, first + step, dtype=torch.int32).view(torch.float32)
        on_device = torch.arange(first, first + step, dtype=torch.int32, device=DEVICE).view(torch.float32)
        found = cuda_elementary.elementwise(name, on_device)
        wanted = cpu_elementary.elementwise(name, x).to(DEVICE)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), hex(first & 0xFFFFFFFF)


@pytest.mark.parametrize("name", ["exp", "log", "tanh"])
def test_the_vendors_function_fails_the_same_comparison(name):
    x = numbers(400_000).to(DEVICE)
    faults, _ = count_faults(name, x, getattr(torch, name)(x))
    assert faults > 1000
    assert count_faults(name, x, cuda_elementary.elementwise(name, x))[0] == 0


def test_views_are_read_where_they_lie():
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((301, 203)).astype(np.float32))
    for view in (lambda t: t.t(), lambda t: t[1:, 1:], lambda t: torch._neg_view(t), lambda t: t[:0]):
        found = cuda_elementary.elementwise("exp", view(x.to(DEVICE)))
        assert to_bits(found).tobytes() == to_bits(cpu_elementary.elementwise("exp", view(x))).tobytes()


def test_a_gradient_that_is_expanded_or_of_another_format():
    x, g = numbers(300).view(20, 15), torch.randn(15)
    found = cuda_elementary.gradient("tanh_derivative", g.to(DEVICE), x.to(DEVICE), FLOAT32)
    assert differing(found, cpu_elementary.gradient("tanh_derivative", g, x, FLOAT32)) == 0
    found = cuda_elementary.gradient("exp", g.half().to(DEVICE), x.bfloat16().to(DEVICE), BFLOAT16)
    assert differing(found, cpu_elementary.gradient("exp", g.half(), x.bfloat16(), BFLOAT16)) == 0
