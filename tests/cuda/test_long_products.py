"""Products of so many terms that no tile of them fits the scratch memory, by a backend that notes what it is asked for."""

import ctypes
from math import prod
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB  # noqa: E402
from det_lightning.kernels import cuda_gemm  # noqa: E402
from det_lightning.kernels.cpu import gemm as cpu_gemm  # noqa: E402
from det_lightning.kernels.cpu import reduction  # noqa: E402
from det_lightning.kernels.cuda_layout import Sizes, float64_layout_of, layout_of, most_terms  # noqa: E402

from .conftest import to_bits  # noqa: E402
from .test_products_on_gpu import any_finite, assert_same, normal, numbers, with_specials  # noqa: E402

TERMS = 2 * (1 << 16) + 5


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, str]]:
    """The terms and the kind of result of every product that a device would get; the CPU adds the digits."""
    found = []

    def site_of(x, w, bias, out, workspace_bytes, path, engine):
        found.append((x.shape[-1], out))

        def run(x, w, bias_at, out_at, moduli):
            shape = (x.shape[0], w.shape[0], NB)
            memory = (ctypes.c_int64 * prod(shape)).from_address(out_at)
            cpu_gemm.add_gemm_digits(torch.frombuffer(memory, dtype=torch.int64).view(shape), x, w, "auto")

        return SimpleNamespace(run=run)

    monkeypatch.setattr(cuda_gemm, "_site_of", site_of)
    monkeypatch.setattr(cuda_gemm, "cuda_reduction", reduction)
    return found


@pytest.mark.parametrize("data", [normal, any_finite, with_specials])
def test_a_product_is_added_up_in_parts_of_its_terms(asked, data):
    rng = numbers(41)
    x, w, bias = data(rng, FLOAT32, (3, TERMS)), data(rng, FLOAT32, (2, TERMS)), data(rng, FLOAT32, (2, 2))[:, 0]
    bias = bias.contiguous()
    for one_bias, form in ((None, FLOAT32), (bias, BFLOAT16)):
        found = cuda_gemm.gemm(x, w, one_bias, form, "int8", workspace_bytes=2 * 2 * NB * 8)
        assert_same(to_bits(found), to_bits(cpu_gemm.gemm(x, w, one_bias, form, "auto")))
    # Two rows of digits at a time, then the last one.
    assert asked == [(terms, "digits") for terms in (1 << 16, 1 << 16, 5)] * 4


def test_a_batch_in_parts(asked):
    rng = numbers(42)
    x, w = normal(rng, BFLOAT16, (2 * 2, TERMS)).view(2, 2, TERMS), normal(rng, BFLOAT16, (2, TERMS)).view(2, 1, TERMS)
    found = cuda_gemm.gemm(x, w, None, FLOAT32, "int8", workspace_bytes=1 << 20)
    for b in range(2):
        assert_same(to_bits(found[b]), to_bits(cpu_gemm.gemm(x[b], w[b], None, FLOAT32, "auto")))
    assert len(asked) == 2 * 3


def test_digits_of_parts_are_added_to_what_was_there(asked):
    rng = numbers(43)
    x, w = any_finite(rng, FLOAT32, (2, TERMS)), any_finite(rng, FLOAT32, (2, TERMS))
    start = torch.from_numpy(rng.integers(-(1 << 40), 1 << 40, (2, 2, NB)))
    start[..., -3:] = 1
    found, wanted = start.clone(), start.clone()
    cuda_gemm.add_gemm_digits(found, x, w, "int8", workspace_bytes=1)
    cpu_gemm.add_gemm_digits(wanted, x, w, "auto")
    assert torch.equal(reduction.normalise(found), reduction.normalise(wanted)) and len(asked) == 3


def test_fewer_terms_are_one_product(asked):
    x = torch.ones((2, 1 << 16))
    cuda_gemm.add_gemm_digits(torch.zeros((2, 2, NB), dtype=torch.int64), x, x, "int8", workspace_bytes=1)
    cuda_gemm.add_gemm_digits(torch.zeros((2, 2, NB), dtype=torch.int64), *2 * [torch.ones((2, TERMS))], "int8")
    assert [terms for terms, _ in asked] == [1 << 16, TERMS]


@pytest.mark.parametrize("engine", ["int8", "float64"])
def test_the_smallest_tile_of_a_part_fits_the_scratch(engine):
    terms = most_terms(engine, 1 << 30)
    assert terms >= 1 << 16 and terms % 128 == 0
    for several, fits in ((1, True), (2, False)):
        sizes = Sizes(1, 256, 256, several * terms)
        layout = float64_layout_of(12, sizes) if engine == "float64" else layout_of(12, sizes, 256)
        assert (layout.bytes <= (1 << 30) + (8 << 20)) == fits
