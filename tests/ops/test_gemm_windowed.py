"""Products added into windowed digits are the products in full digits, whatever the window was before."""

import pytest
import torch

from det_lightning.arithmetic.windowed_digits import MAXIMUM_STATES
from det_lightning.errors import InputError
from det_lightning.ops import gemm_windowed as module
from det_lightning.ops.digits import normalise_digits
from det_lightning.ops.gemm import det_gemm, det_gemm_partial
from det_lightning.ops.gemm_windowed import add_gemm_windowed, gemm_windowed
from det_lightning.ops.windowed_digits import WindowedDigits
from tests.same_bits import assert_same_bits


def operands(seed: int, m: int = 9, k: int = 40, n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)


def test_a_product_in_windowed_digits_is_the_product_in_full_digits():
    x, w = operands(1)
    x[3, 5], x[4], w[2, 7] = 2.0**90, 0, 1e-40
    windowed = gemm_windowed(x, w)
    assert torch.equal(windowed.to_digits(), det_gemm_partial(x, w))
    assert_same_bits(windowed.round(), det_gemm(x, w))


def test_sums_of_products_of_any_ranges_are_exact():
    total, wanted = None, 0
    for turn, scale in enumerate((0, -100, 60, -30, 3)):
        x, w = operands(turn)
        x *= 2.0**scale
        total = gemm_windowed(x, w) if total is None else add_gemm_windowed(total, x, w)
        wanted = wanted + det_gemm_partial(x, w)
    assert torch.equal(total.to_digits(), normalise_digits(wanted))


def test_more_products_than_words_hold_without_a_carry():
    x, w = operands(2, 2, 3, 2)
    total = gemm_windowed(x, w)
    for _ in range(2 * MAXIMUM_STATES + 3):
        add_gemm_windowed(total, x, w)
    assert torch.equal(total.to_digits(), normalise_digits(det_gemm_partial(x, w) * (2 * MAXIMUM_STATES + 4)))


def test_special_values_are_counted():
    x, w = operands(3)
    x[1, 2], x[2, 0], w[0, 0] = float("inf"), float("nan"), float("-inf")
    assert_same_bits(gemm_windowed(x, w).round(), det_gemm(x, w))


def test_blocks_of_rows_cannot_be_seen(monkeypatch):
    x, w = operands(4)
    x[1, 2], x[7] = float("inf"), x[7] * 2.0**70
    wanted = gemm_windowed(x, w).to_digits()
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 20)
    assert torch.equal(gemm_windowed(x, w).to_digits(), wanted)


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 4), (3, 4, 0)])
def test_empty_products(shape):
    m, k, n = shape
    assert gemm_windowed(torch.zeros(m, k), torch.zeros(n, k)).to_digits().shape[:2] == (m, n)


def test_a_target_of_another_shape_is_refused():
    x, w = operands(5)
    target = WindowedDigits.zeros((9, 8), torch.zeros(9, dtype=torch.int64), 2)
    with pytest.raises(InputError, match=r"target is \[9, 8\]"):
        add_gemm_windowed(target, x, w)
    with pytest.raises(InputError, match="same K"):
        gemm_windowed(x, w[:, 1:])
