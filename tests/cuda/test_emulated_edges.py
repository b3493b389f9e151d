"""Products where kernels go wrong first, by both engines in the emulator, against the definition of `arithmetic`: sizes of
one, long rows, strides, patterns of all exponents, threads in any order."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic import long_accumulator  # noqa: E402
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32  # noqa: E402
from det_lightning.kernels import cuda_paths  # noqa: E402
from det_lightning.kernels.cpu import gemm as cpu_gemm  # noqa: E402
from det_lightning.kernels.cpu import reduction  # noqa: E402
from det_lightning.ops.gemm import det_gemm_partial  # noqa: E402

from .conftest import BITS, from_bits, to_bits  # noqa: E402
from .test_products_on_gpu import FORMATS, any_finite, assert_same, normal, numbers, outliers  # noqa: E402

ENGINES = ["float64", "int8"]
DISORDERS = [1, 2]
"""Orders of threads: see `emulator/grid.h`."""


def patterns(tensor: torch.Tensor) -> list:
    """Of the float32 of the same values."""
    return (tensor.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF).tolist()


def defined(x, w, bias, form) -> np.ndarray:
    """Bits of x @ w.T + bias by the definition."""
    out, terms = [], [0] * len(w) if bias is None else patterns(bias)
    for row, (column, term) in itertools.product(patterns(x), zip(patterns(w), terms, strict=True)):
        state = long_accumulator.zero_state()
        for a, b in zip(row, column, strict=True):
            long_accumulator.add_product(state, a, b)
        long_accumulator.add_term(state, term)
        out.append(long_accumulator.finalize(state, form))
    return np.array(out, BITS[form]).reshape(len(x), len(w))


def any_pattern(rng, form, shape) -> torch.Tensor:
    """All exponents, and among them zeros of both signs, infinities, NaNs of several payloads, the smallest subnormals: in
    some rows, so that others stay finite."""
    x = any_finite(rng, form, shape)
    special = [0, 0, form.infinity_bits, form.nan_bits, form.infinity_bits + 1, 1, 2, form.infinity_bits - 1]
    bits = np.array([pattern | sign for sign in (0, form.sign_bit) for pattern in special], BITS[form])
    for row in range(0, shape[0], 3):
        x[row, rng.integers(0, shape[1])] = from_bits(bits[row // 3 % 16 : row // 3 % 16 + 1], form)[0]
    return x


def same(x, w, form, run, **how) -> None:
    assert_same(to_bits(run(x, w, form, **how)), to_bits(cpu_gemm.gemm(x, w, how.get("bias"), form, "auto")))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 1), (3, 1, 2), (1, 17, 129), (129, 15, 1)], ids=str)
def test_sizes_of_one_and_beside_blocks(emulated_product, shape, engine):
    m, k, n = shape
    for seed, form in enumerate(FORMATS):
        x, w = any_pattern(numbers(50 + seed), form, (m, k)), any_finite(numbers(60 + seed), form, (n, k))
        found = emulated_product(x, w, form, engine=engine)
        assert_same(to_bits(found), defined(x, w, None, form))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("x_form", FORMATS, ids=lambda form: form.name)
def test_all_patterns_of_one_format_times_another_with_a_bias(emulated_product, x_form, engine):
    rng = numbers(70)
    w_form, out = FORMATS[FORMATS.index(x_form) - 1], FORMATS[FORMATS.index(x_form) - 2]
    x, w, bias = any_pattern(rng, x_form, (48, 21)), any_finite(rng, w_form, (6, 21)), normal(rng, x_form, (6,))
    wanted = defined(x, w, bias, out)
    assert {out.nan_bits, out.infinity_bits, out.infinity_bits | out.sign_bit} <= set(wanted.flat)
    assert_same(to_bits(emulated_product(x, w, out, bias, engine)), wanted)
    small = normal(rng, w_form, (6, 21)) * 2.0**-12  # results of every size of the output, subnormal ones too
    x = normal(rng, x_form, (9, 21))
    assert_same(to_bits(emulated_product(x, small, out, None, engine)), defined(x, small, None, out))


@pytest.mark.parametrize("engine", ENGINES)
def test_signs_of_zero_and_sums_that_cancel(emulated_product, engine):
    x = torch.tensor(
        [[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0], [1.0, -1.0, 2.0**-149], [2.0**127, -(2.0**127), -(2.0**-140)]]
    )
    w = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 2.0**-9], [0.0, -0.0, -0.0]])
    for form in FORMATS:
        bias = torch.tensor([-0.0, 0.0, -(2.0**-149)])
        for one in (None, bias):
            assert_same(to_bits(emulated_product(x, w, form, one, engine)), defined(x, w, one, form))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_longer_than_a_team_of_threads_takes_at_once(emulated_product, engine):
    for seed, data in enumerate((normal, any_finite)):
        rng = numbers(80 + seed)
        x, w = data(rng, FLOAT32, (2, 4099)), data(rng, FLOAT32, (1, 4099))
        same(x, w, FLOAT32, emulated_product, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_an_odd_depth_beyond_what_32_bits_add_up(emulated_product, engine):
    x = torch.full((2, 131_073), -127.0)  # residues near their ends, all of one sign
    x += torch.from_numpy(numbers(90).integers(-1, 1, x.shape).astype(np.float32))
    moduli = {"int8": 5, "float64": 6}[engine]
    same(x, x, FLOAT32, emulated_product, engine=engine, moduli=moduli)
    found = to_bits(emulated_product(x[:1], x[:1], FLOAT32, engine=engine, moduli=moduli))
    assert_same(found, defined(x[:1], x[:1], None, FLOAT32))
    x, w = normal(numbers(91), FLOAT32, (1, 131_073)), normal(numbers(92), FLOAT16, (3, 131_073))
    same(x, w, FLOAT32, emulated_product, engine=engine, moduli=moduli)


VIEWS = {
    "transposed": lambda t: t.t()[:23, :40],
    "from an odd place": lambda t: t[1:24, 1:42],
    "every second row": lambda t: t[:40:2, 3:44],
    "every third term": lambda t: t[:20, ::3],
    "one row many times": lambda t: t[:1].expand(19, -1),
    "one term many times": lambda t: t[:20, :1].expand(-1, 37),
    "negated": lambda t: torch._neg_view(t[:20]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_strides_cannot_be_seen(emulated_product, view, engine):
    for form in (FLOAT32, BFLOAT16):
        x = VIEWS[view](normal(numbers(100), form, (61, 63)))
        same(x, x[:7], FLOAT32, emulated_product, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_of_one_operand_again_and_again(emulated_product, engine):
    rng = numbers(110)
    x, w = any_finite(rng, FLOAT32, (3 * 5, 20)).view(3, 5, 20), normal(rng, FLOAT16, (9, 20))
    for a, b in ((x, w.expand(3, -1, -1)), (w.expand(3, -1, -1), x), (x[:1].expand(2, -1, -1), x[1:, :, :])):
        for workspace_bytes in (1, 1 << 30):
            found = emulated_product(a, b, FLOAT32, engine=engine, workspace_bytes=workspace_bytes)
            for n, product in enumerate(found):
                assert_same(to_bits(product), to_bits(cpu_gemm.gemm(a[n], b[n], None, FLOAT32, "auto")))


@pytest.mark.parametrize("engine", ENGINES)
def test_undecided_elements_beyond_the_list_are_found_by_their_flags(emulated_product, monkeypatch, engine):
    monkeypatch.setattr(cuda_paths, "LIST_SIZE", 5)
    rng = numbers(120)
    x, w = any_finite(rng, FLOAT32, (19, 30)), any_finite(rng, FLOAT32, (34, 30))
    same(x, w, FLOAT32, emulated_product, engine=engine)


@pytest.mark.parametrize("disorder", DISORDERS)
@pytest.mark.parametrize(
    "how", [("float64", "steps"), ("int8", "steps"), ("int8", "whole"), ("int8", "short")], ids=str
)
def test_the_order_of_threads_and_of_copies_cannot_be_seen(emulated_product, how, disorder):
    engine, path = how
    rng = numbers(130 + disorder)
    terms = 50 if path == "short" else 140
    x, w = any_pattern(rng, FLOAT32, (17, terms)), outliers(rng, FLOAT32, (35, terms))
    same(x, w, FLOAT32, emulated_product, engine=engine, path=path, disorder=disorder)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_threads_cannot_be_seen_in_digits(emulated_product, engine):
    rng = numbers(135)
    x, w = any_pattern(rng, FLOAT32, (17, 40)), outliers(rng, FLOAT32, (5, 40))
    wanted = reduction.normalise(emulated_product(x, w, "digits", engine=engine))
    assert torch.equal(wanted, det_gemm_partial(x, w))
    for disorder in DISORDERS:
        found = reduction.normalise(emulated_product(x, w, "digits", engine=engine, disorder=disorder))
        assert torch.equal(found, wanted)


# The negative controls: what is taken away from residue_gemm_float64.
SPOILED = {
    "no barrier before the products": ("<STAGES - 2>();\n        __syncthreads();", "<STAGES - 2>();"),
    "no wait for copies": ("        wait_for_copies<STAGES - 2>();", ""),
    "copies from odd places": ("int at = (q * THREADS + threadIdx.x) * 16;", "int at = q * THREADS * 16 + threadIdx.x * 8;"),
}  # fmt: skip


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_race_or_an_odd_address_in_a_kernel_is_seen(emulator, emulated_product, tmp_path, monkeypatch, spoiled):
    x = normal(numbers(140), FLOAT32, (17, 140))
    wanted = to_bits(emulated_product(x, x, FLOAT32))
    other = emulator.altered(tmp_path, "residue_gemm_float64", *SPOILED[spoiled])
    monkeypatch.setattr(cuda_paths, "Chain", other.chain)
    if "odd" in spoiled:
        with pytest.raises(AssertionError, match=r"residue_gemm_float64: .*not allowed"):
            emulated_product(x, x, FLOAT32)
        return
    assert any((to_bits(emulated_product(x, x, FLOAT32, disorder=n)) != wanted).any() for n in DISORDERS)
