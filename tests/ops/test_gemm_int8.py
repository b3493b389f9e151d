"""The int8 engine: the bits of every other engine, refused where int8 products saturate."""

from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.arithmetic.residue import balanced_residue
from det_lightning.arithmetic.residue_int8 import (
    MAXIMUM_MODULI,
    MAXIMUM_TERMS,
    RESIDUE_LIMIT,
    capacity,
    fold,
    moduli,
    reconstruct,
)
from det_lightning.errors import InputError
from det_lightning.kernels.cpu import amx, gemm, gemm_int8
from det_lightning.ops.gemm import add_gemm_digits, det_gemm, det_gemm_partial
from tests.ops.exact_oracle import any_patterns, cancelling_pair, exact_gemm, wide_values
from tests.same_bits import assert_same_bits

SHAPES = [(1, 1, 1), (1, 70, 1), (31, 63, 33), (32, 64, 32), (33, 65, 31), (40, 300, 17), (65, 4200, 3), (2, 9000, 130)]

here = pytest.mark.skipif(not gemm_int8.products_are_exact(), reason="int8 products saturate on this processor")


def test_moduli_are_coprime_and_their_residues_fit():
    chosen = moduli(MAXIMUM_MODULI)
    assert chosen[:5] == (256, 255, 253, 251, 247)
    assert all(gcd(p, q) == 1 for i, p in enumerate(chosen) for q in chosen[:i])
    assert all(abs(balanced_residue(v, p)) <= RESIDUE_LIMIT for p in chosen for v in range(-300, 300))
    assert MAXIMUM_TERMS * RESIDUE_LIMIT**2 < 2**31 <= (MAXIMUM_TERMS + 2) * RESIDUE_LIMIT**2
    assert capacity(MAXIMUM_MODULI) == 16 * 126


@given(st.integers(1, MAXIMUM_MODULI).flatmap(lambda n: st.tuples(st.just(n), st.integers(-(2**126), 2**126))))
def test_an_integer_within_the_capacity_is_rebuilt(case):
    count, value = case
    value >>= max(0, value.bit_length() - capacity(count) // 16)
    coefficients = tuple(balanced_residue(value * f, p) for f, p in zip(fold(count), moduli(count), strict=True))
    assert reconstruct(coefficients) == value


@here
@pytest.mark.parametrize("spread", [0.0, 3.0, 12.0])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 1, 1), (5, 40, 3), (33, 129, 20)])
def test_int8_has_the_bits_of_the_definition(rows, terms, columns, spread):
    x, w, bias = (
        wide_values(i, *s, spread=spread) for i, s in enumerate([(rows, terms), (columns, terms), (columns,)])
    )
    assert_same_bits(det_gemm(x, w, bias, engine="int8"), exact_gemm(x, w, bias))
    assert torch.equal(det_gemm_partial(x, w, engine="int8"), det_gemm_partial(x, w, engine="long_accumulator"))


@here
@pytest.mark.parametrize("engine", ["auto", "int8"])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(800, 1, 700), (9, 65_537, 8), (3, 131_073, 5)])
def test_sums_of_one_term_alone_or_left_over_from_a_tile(rows, terms, columns, engine):
    x, w = wide_values(1, rows, terms, spread=1), wide_values(2, columns, terms, spread=1)
    assert_same_bits(det_gemm(x, w, engine=engine), det_gemm(x, w, engine="long_accumulator"))


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats(dtype):
    x, w = wide_values(1, 9, 70, spread=1).to(dtype), wide_values(2, 8, 70, spread=1).to(dtype)
    assert_same_bits(det_gemm(x, w, dtype=dtype, engine="int8"), exact_gemm(x, w, dtype=dtype))


@here
def test_special_values_wide_rows_and_cancellation():
    x, w = any_patterns(1, 12, 40), any_patterns(2, 10, 40)
    x[::2], w[::2] = wide_values(3, 6, 40, spread=1), wide_values(4, 5, 40, spread=1)
    assert_same_bits(det_gemm(x, w, engine="int8"), exact_gemm(x, w))
    x, w = cancelling_pair(1, 300)
    assert_same_bits(det_gemm(x, w, engine="int8"), exact_gemm(x, w))


@pytest.mark.skipif(not amx.is_available(), reason="no AMX tiles")
@pytest.mark.parametrize(("rows", "terms", "columns"), SHAPES)
def test_tiles_and_the_library_give_the_same_sums(rows, terms, columns, monkeypatch):
    x, w, bias = (
        wide_values(1, rows, terms, spread=2),
        wide_values(2, columns, terms, spread=2),
        wide_values(3, columns),
    )
    x[0, :2] = 2.0**60  # a row of two bands
    expected = det_gemm(x, w, bias, engine="long_accumulator")
    assert_same_bits(det_gemm(x, w, bias, engine="int8"), expected)
    assert_same_bits(det_gemm(w, x, engine="int8"), det_gemm(w, x, engine="long_accumulator"))
    monkeypatch.setattr(amx, "is_available", lambda: False)
    monkeypatch.setattr(amx, "products", lambda *arguments: pytest.fail("used"))
    assert_same_bits(det_gemm(x, w, bias, engine="int8"), expected)


@here
def test_residues_of_extreme_integers_stay_within_a_byte():
    # Integers of one significand bit and of all 54 bits, both signs, next to all limbs' carries.
    edges = [1.0, 2.0**15, 2.0**16 - 1, 2.0**23, 2.0**24 - 1, 2.0**31, 2.0**46, 2.0**47, 2.0**53]
    x = torch.tensor([[sign * edge for edge in edges for sign in (1, -1)] + [1.0] * 6])
    generator = torch.Generator().manual_seed(5)
    x = x[:, torch.stack([torch.randperm(24, generator=generator) for _ in range(40)])].squeeze(0)
    w = x[:, torch.randperm(24, generator=generator)]
    assert_same_bits(det_gemm(x, w, engine="int8"), exact_gemm(x, w))


@here
@pytest.mark.parametrize("count", [1, 5, 9])
def test_too_few_moduli_change_only_the_time(count, monkeypatch):
    x, w = wide_values(1, 20, 60, spread=2), wide_values(2, 16, 60, spread=2)
    expected = det_gemm(x, w, engine="long_accumulator")
    monkeypatch.setattr(gemm_int8, "moduli_count", lambda *arguments: count)
    assert_same_bits(det_gemm(x, w, engine="int8"), expected)


@here
def test_every_choice_of_auto_has_the_same_bits(monkeypatch):
    x, w = torch.randn(64, 200), torch.randn(50, 200)
    expected = det_gemm(x, w)
    monkeypatch.setattr(gemm_int8, "is_fast", lambda: True)
    monkeypatch.setattr(gemm_int8, "is_worth_starting", lambda *arguments: True)
    calls = []
    products = gemm_int8.residue_products
    monkeypatch.setattr(gemm_int8, "residue_products", lambda *a: calls.append(a) or products(*a))
    assert_same_bits(det_gemm(x, w), expected)
    assert calls


@here
def test_digits_over_several_chunks_of_terms(monkeypatch):
    monkeypatch.setattr(gemm, "CHUNK_TERMS", 64)
    x, w = wide_values(1, 4, 200, spread=2), wide_values(2, 3, 200, spread=2)
    digits = torch.zeros((4, 3, 21), dtype=torch.int64)
    add_gemm_digits(digits, x, w, engine="int8")
    assert_same_bits(det_gemm(x, w, engine="int8"), exact_gemm(x, w))


def test_a_library_that_saturates_is_found_out_and_refused(monkeypatch):
    def saturating(x, w, out=None):
        # vpmaddubsw adds two neighbouring products in 16 bits.
        pairs = x.int().unsqueeze(2) * w.int().unsqueeze(0)
        pairs = torch.nn.functional.pad(pairs, (0, 0, 0, pairs.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1).int()

    x, w = torch.randn(4, 8), torch.randn(3, 8)
    expected = det_gemm(x, w)
    gemm_int8.library_is_exact.cache_clear()
    gemm_int8.is_fast.cache_clear()
    monkeypatch.setattr(amx, "is_available", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", saturating)
    try:
        assert not gemm_int8.products_are_exact()
        assert not gemm_int8.is_fast()
        with pytest.raises(InputError, match="saturate"):
            det_gemm(x, w, engine="int8")
        assert_same_bits(det_gemm(x, w), expected)
    finally:
        gemm_int8.library_is_exact.cache_clear()
        gemm_int8.is_fast.cache_clear()
