"""What may not change a bit of det_gemm: order, tiles, split of K, batch, threads, strides, engine, wrong guesses."""

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.kernels.cpu import gemm as launcher
from det_lightning.kernels.cpu import gemm_float64
from det_lightning.ops.digits import det_combine, det_finalize, zero_digits
from det_lightning.ops.gemm import ENGINES, add_gemm_digits, det_gemm, det_gemm_partial
from tests.ops.exact_oracle import any_patterns, cancelling_pair, exact_gemm, wide_values
from tests.same_bits import assert_same_bits

every_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def operands(m=33, k=257, n=29):
    return wide_values(1, m, k), wide_values(2, n, k), wide_values(3, n)


@settings(max_examples=30)
@given(order=st.permutations(range(60)), seed=st.integers(0, 1000))
def test_the_order_of_terms_does_not_matter(order, seed):
    x, w = any_patterns(seed, 2, 60), wide_values(seed, 3, 60, spread=25.0)
    for engine in ENGINES:
        assert_same_bits(det_gemm(x[:, order], w[:, order], engine=engine), det_gemm(x, w))


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 257), max_size=6), seed=st.integers(0, 1000), engine=st.sampled_from(ENGINES))
def test_any_split_of_the_terms_composes(cuts, seed, engine):
    x, w = wide_values(seed, 4, 257), wide_values(seed + 1, 3, 257)
    bounds = [0, *sorted(cuts), 257]
    parts = [det_gemm_partial(x[:, a:b], w[:, a:b], engine=engine) for a, b in itertools.pairwise(bounds)]
    assert_same_bits(det_finalize(det_combine(parts)), det_gemm(x, w))
    assert_same_bits(det_finalize(det_combine(parts[::-1])), det_gemm(x, w))


@every_engine
def test_a_row_does_not_depend_on_the_batch_around_it(engine):
    x, w, bias = operands()
    whole = det_gemm(x, w, bias, engine=engine)
    for rows in (slice(0, 1), slice(5, 6), slice(30, 33), slice(0, 17)):
        assert_same_bits(det_gemm(x[rows], w, bias, engine=engine), whole[rows])
    for columns in (slice(3, 4), slice(0, 28)):
        assert_same_bits(det_gemm(x, w[columns], bias[columns], engine=engine), whole[:, columns])


@every_engine
def test_threads_do_not_matter_and_may_outnumber_the_rows(engine, threads):
    x, w, bias = operands(m=7, k=5000)
    threads(1)
    expected, digits = det_gemm(x, w, bias, engine=engine), det_gemm_partial(x, w, engine=engine)
    for count in (2, 3, 16):
        threads(count)
        assert_same_bits(det_gemm(x, w, bias, engine=engine), expected)
        assert_same_bits(det_gemm_partial(x, w, engine=engine), digits)


@every_engine
def test_two_threads_may_enter_at_once(engine):
    x, w, bias = operands(m=40, k=900)
    expected = det_gemm(x, w, bias, engine=engine)
    results = [None] * 4

    def enter(place: int) -> None:
        for _ in range(3):
            results[place] = det_gemm(x, w, bias, engine=engine)

    callers = [threading.Thread(target=enter, args=(place,)) for place in range(len(results))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for result in results:
        assert_same_bits(result, expected)


@every_engine
def test_strides_do_not_matter(engine):
    x, w, bias = operands(m=12, k=40, n=11)
    expected = det_gemm(x, w, bias, engine=engine)
    spread = torch.empty(24, 80)
    spread[::2, 1::2] = x
    wide = torch.full((12, 50), float("nan"))
    wide[:, 3:43] = x
    views = [x.T.contiguous().T, spread[::2, 1::2], x.flip(0).flip(0), x.clone().requires_grad_(), wide[:, 3:43]]
    for view in views:
        assert_same_bits(det_gemm(view, w.T.contiguous().T, bias.repeat(2)[11:], engine=engine), expected)
    assert_same_bits(det_gemm(x[:1].expand(5, 40), w, bias, engine=engine), expected[:1].expand(5, 11))
    digits = det_gemm_partial(x, w, engine=engine)
    assert torch.equal(det_gemm_partial(wide[:, 3:43], w, engine=engine), digits)
    assert torch.equal(det_gemm_partial(x[:1].expand(5, 40), w, engine=engine), digits[:1].expand(5, 11, -1))


@every_engine
def test_tiles_and_chunks_do_not_matter(engine, monkeypatch):
    x, w, bias = operands(m=70, k=300, n=45)
    x[3, 7], x[60, 299] = float("inf"), 2.0**120
    expected, digits = det_gemm(x, w, bias, engine=engine), det_gemm_partial(x, w, engine=engine)
    monkeypatch.setattr(launcher, "_tile_side", lambda terms, scratch_bytes: 17)
    assert_same_bits(det_gemm(x, w, bias, engine=engine), expected)
    monkeypatch.setattr(launcher, "CHUNK_TERMS", 64)
    assert_same_bits(det_gemm(x, w, bias, engine=engine), expected)
    assert_same_bits(det_finalize(det_gemm_partial(x, w, engine=engine)), det_finalize(digits))


@pytest.mark.parametrize("count", range(7))
def test_a_wrong_number_of_moduli_costs_time_only(count, monkeypatch):
    x, w, bias = operands(m=9, k=3000, n=8)
    expected = det_gemm(x, w, bias, engine="long_accumulator")
    monkeypatch.setattr(gemm_float64, "moduli_count", lambda *arguments: count)
    assert_same_bits(det_gemm(x, w, bias), expected)
    assert_same_bits(det_finalize(det_gemm_partial(x, w)), det_gemm(x, w))


def test_rows_of_every_width_take_their_own_way(monkeypatch):
    # Spans of 24 to 270 bits side by side: residues, 128 bits and the long accumulator within one product.
    rows = [wide_values(i, 1, 400, spread=i) for i in range(12)]
    rows += [any_patterns(1, 1, 400), torch.zeros(1, 400), *cancelling_pair(5, 400)]
    x = torch.cat(rows)
    w = torch.cat([*cancelling_pair(5, 400)[::-1], *rows[::-1]])
    expected = det_gemm(x, w, engine="long_accumulator")
    for count in range(7):
        monkeypatch.setattr(gemm_float64, "moduli_count", lambda *arguments, n=count: n)
        assert_same_bits(det_gemm(x, w), expected)


def row_of_width(bits: int, terms: int, seed: int) -> torch.Tensor:
    """A row [1, terms] whose lowest and highest set bits are `bits` apart, with elements everywhere between."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(0, bits - 23, (terms,), generator=generator)
    exponents[0], exponents[-1] = 0, bits - 24
    significands = torch.randint(1 << 23, 1 << 24, (terms,), generator=generator) | 1
    signs = torch.randint(0, 2, (terms,), generator=generator) * 2 - 1
    return (significands * signs).double().ldexp(exponents - 149).float().view(1, terms)


def test_rows_at_the_edges_of_bands_are_cut_exactly(monkeypatch):
    widths = [24, 53, 54, 55, 107, 108, 109, 162, 163, 215, 216, 217, 270, 277]
    x = torch.cat([row_of_width(width, 40, width) for width in widths])
    w = torch.cat([row_of_width(width, 40, 1000 + width) for width in (24, 54, 55, 108, 109, 162, 163, 216, 217)])
    bias = torch.cat([torch.tensor([0.0, 1.0, 2.0**-149]), wide_values(1, 6)])
    expected = det_gemm(x, w, bias, engine="long_accumulator")
    assert_same_bits(expected, exact_gemm(x, w, bias))
    for count in range(7):
        monkeypatch.setattr(gemm_float64, "moduli_count", lambda *arguments, n=count: n)
        assert_same_bits(det_gemm(x, w, bias), expected)
        assert_same_bits(det_gemm(w, x).T, det_gemm(x, w))
        assert_same_bits(det_finalize(det_gemm_partial(x, w)), det_gemm(x, w, engine="long_accumulator"))


def test_a_tile_whose_bands_take_too_much_memory_is_quartered(monkeypatch):
    x = torch.cat([row_of_width(width, 30, width) for width in range(24, 215, 3)])
    w = torch.cat([row_of_width(width, 30, width) for width in range(25, 215, 7)])
    expected = det_gemm(x, w, engine="long_accumulator")
    tiles = []
    count = gemm_float64.moduli_count
    monkeypatch.setattr(gemm_float64, "moduli_count", lambda *a: tiles.append(a[0].bands) or count(*a))
    monkeypatch.setattr(launcher, "SCRATCH_BYTES", 60_000)
    monkeypatch.setattr(launcher, "_tile_side", lambda terms, scratch_bytes: 64)
    assert_same_bits(det_gemm(x, w, engine="float64"), expected)
    assert len(tiles) > 4


def test_a_float64_engine_that_fails_its_self_test_is_not_used(monkeypatch):
    x, w, bias = operands()
    monkeypatch.setattr(gemm_float64, "products_are_exact", lambda: False)
    monkeypatch.setattr(gemm_float64, "residue_products", lambda *arguments: pytest.fail("used"))
    assert_same_bits(det_gemm(x, w, bias, engine="float64"), det_gemm(x, w, bias, engine="long_accumulator"))


def test_the_self_test_of_the_float64_engine_passes_here():
    assert gemm_float64.products_are_exact()


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flushing_subnormals_in_the_calling_thread_changes_nothing(dtype, engine):
    x, w = wide_values(4, 6, 50, spread=40.0).to(dtype), wide_values(5, 7, 50, spread=40.0)
    tiny = torch.tensor([3], dtype=torch.int16).view(dtype) if dtype != torch.float32 else torch.tensor(3 * 2.0**-149)
    x[:3] = tiny
    w[0] = 2.0**-7
    expected = det_gemm(x, w, engine=engine)
    assert torch.set_flush_denormal(True)
    try:
        result = det_gemm(x, w, engine=engine)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("shape", [(200, 1500, 150), (64, 4500, 64)])
def test_engines_agree_on_larger_products(shape):
    m, k, n = shape
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    expected = det_gemm(x, w, engine="long_accumulator")
    assert_same_bits(det_gemm(x, w, engine="float64"), expected)
    assert_same_bits(det_gemm(x, w), expected)
    half = x.to(torch.bfloat16)
    assert_same_bits(det_gemm(half, w, engine="float64"), det_gemm(half, w, engine="long_accumulator"))


@every_engine
def test_digits_are_added_in_place_onto_any_state(engine):
    x, w, _ = operands(m=6, k=50, n=5)
    digits = det_gemm_partial(x, w, engine=engine)
    expected = det_combine([digits, digits, digits])
    target = zero_digits((5, 6)).transpose(0, 1)
    for _ in range(3):
        assert add_gemm_digits(target, x, w, engine=engine) is None
    assert_same_bits(target, expected)


def test_the_order_of_terms_does_change_plain_float32():
    x, w = cancelling_pair(1, 200)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="ulps apart"):
        assert_same_bits(x[:, order] @ w[:, order].T, x @ w.T)


@every_engine
def test_scratch_memory_stays_under_its_bound(engine, monkeypatch):
    x, w = torch.randn(300, 700), torch.randn(200, 700)
    expected, taken = det_gemm(x, w, engine=engine), []
    kept = launcher.workspace
    monkeypatch.setattr(launcher, "workspace", lambda needed: taken.append(needed) or kept(needed))
    bound = 1 << 20
    assert_same_bits(det_gemm(x, w, engine=engine, scratch_bytes=bound), expected)
    assert taken and max(taken) <= bound
    assert engine == "long_accumulator" or len(taken) > 4
    det_gemm(x, w, engine=engine)
    assert engine == "long_accumulator" or max(taken) > bound  # without the bound one tile takes more
