"""The kernels of products against the CPU's products, byte for byte, without a GPU: run by an emulator (`emulator`)."""

import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB  # noqa: E402
from det_lightning.kernels import cuda_gemm_windowed  # noqa: E402
from det_lightning.kernels.cpu import gemm as cpu_gemm  # noqa: E402
from det_lightning.kernels.cpu import reduction  # noqa: E402
from det_lightning.ops.gemm import det_gemm_partial  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402

from .conftest import to_bits  # noqa: E402
from .test_products_on_gpu import DATA, assert_same, normal, numbers  # noqa: E402


@pytest.mark.parametrize("engine", ["float64", "int8"])
@pytest.mark.parametrize("data", DATA)
def test_products_of_any_data_equal_those_of_the_cpu(emulated_product, data, engine):
    rng = numbers(31)
    x, w, bias = (DATA[data](rng, FLOAT32, shape) for shape in ((17, 150), (35, 150), (35, 2)))
    bias = bias[:, 0].contiguous()
    for one_bias, form in ((None, FLOAT32), (bias, BFLOAT16)):
        found = emulated_product(x, w, form, one_bias, engine)
        assert_same(to_bits(found), to_bits(cpu_gemm.gemm(x, w, one_bias, form, "auto")))


@pytest.mark.parametrize(("path", "terms"), [("whole", 140), ("short", 50)])
@pytest.mark.parametrize("data", ["normal", "any_finite", "with_specials"])
def test_the_other_paths_of_the_int8_engine(emulated_product, data, path, terms):
    rng = numbers(37)
    x, w = DATA[data](rng, FLOAT32, (17, terms)), DATA[data](rng, FLOAT32, (35, terms))
    found = emulated_product(x, w, FLOAT32, engine="int8", path=path)
    assert_same(to_bits(found), to_bits(cpu_gemm.gemm(x, w, None, FLOAT32, "auto")))


@pytest.mark.parametrize("moduli", [6, 15])
def test_the_number_of_moduli_cannot_be_seen(emulated_product, moduli):
    rng = numbers(32)
    x, w = normal(rng, FLOAT32, (20, 140)), normal(rng, FLOAT32, (9, 140))
    wanted = to_bits(cpu_gemm.gemm(x, w, None, FLOAT32, "auto"))
    assert_same(to_bits(emulated_product(x, w, FLOAT32, moduli=moduli)), wanted)
    # The negative control: six moduli are too few, and the last kernel sets that right.
    alone = to_bits(emulated_product(x, w, FLOAT32, moduli=moduli, leave_out="gemm_flagged"))
    assert ((alone != wanted).mean() > 0.01) == (moduli == 6)


def test_a_batch_of_narrow_numbers_in_several_tiles(emulated_product):
    rng = numbers(33)
    x, w = normal(rng, BFLOAT16, (2 * 20, 33)).view(2, 20, 33), normal(rng, BFLOAT16, (2 * 260, 33)).view(2, 260, 33)
    found = emulated_product(x, w, FLOAT32, workspace_bytes=1)
    for b in range(2):
        assert_same(to_bits(found[b]), to_bits(cpu_gemm.gemm(x[b], w[b], None, FLOAT32, "auto")))


@pytest.mark.parametrize("data", ["normal", "any_finite", "with_specials"])
def test_digits_equal_those_of_the_cpu(emulated_product, data):
    rng = numbers(34)
    x, w = DATA[data](rng, FLOAT32, (17, 60)), DATA[data](rng, FLOAT32, (5, 60))
    wanted = torch.zeros((17, 5, NB), dtype=torch.int64)
    cpu_gemm.add_gemm_digits(wanted, x, w, "auto")
    found = reduction.normalise(emulated_product(x, w, "digits", moduli=15))
    assert found.numpy().tobytes() == reduction.normalise(wanted).numpy().tobytes()


def test_largest_residues_of_one_sign_over_several_sums(emulated_product):
    x = torch.full((3, 400), -127.0) + torch.from_numpy(numbers(35).integers(-1, 1, (3, 400)))
    x = x.float()
    assert_same(to_bits(emulated_product(x, x, FLOAT32)), to_bits(cpu_gemm.gemm(x, x, None, FLOAT32, "auto")))


@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_windowed_digits_hold_the_product(emulated_product, engine):
    rng = numbers(36)
    x, w = normal(rng, FLOAT32, (20, 70)), normal(rng, FLOAT32, (9, 70))
    words, base = torch.empty((5, 20, 9), dtype=torch.int32), torch.empty(20, dtype=torch.int64)
    try:
        assert cuda_gemm_windowed.add(x, w, words, base, True, 15, engine) is None
    finally:
        cuda_gemm_windowed._known.prepared.clear()
    assert torch.equal(WindowedDigits(base, words).to_digits(), det_gemm_partial(x, w))
