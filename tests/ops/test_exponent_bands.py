"""Bands of exponents: their products add up to the product, exactly, and each band is as narrow as it says."""

import pytest
import torch

from det_lightning.ops.digits import normalise_digits
from det_lightning.ops.exponent_bands import BAND_BITS, bands_of_exponents
from det_lightning.ops.gemm import det_gemm_partial
from tests.ops.exact_oracle import INF, NAN, wide_values


def after_a_sure_softmax(rows: int, columns: int) -> torch.Tensor:
    logits = 9 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return torch.softmax(logits, dim=0) - torch.eye(rows, columns)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_bands_add_up_to_the_product(side, dtype):
    wide, plain = after_a_sure_softmax(70, 40).to(dtype), torch.randn(30, 40).to(dtype)
    wide[3], wide[4, 5] = 0, 2.0**-149
    operands = (wide, plain) if side == 0 else (plain, wide)
    bands = list(bands_of_exponents(*operands))
    assert len(bands) > 3
    total = sum(det_gemm_partial(x, w) for x, w in bands)
    assert torch.equal(normalise_digits(total), det_gemm_partial(*operands))
    for pair in bands:
        assert pair[1 - side] is operands[1 - side]
        magnitudes = pair[side].float().abs()
        least = torch.where(magnitudes == 0, INF, magnitudes).amin(dim=1)
        assert bool((magnitudes.amax(dim=1) < least * 2.0**BAND_BITS).all())
    assert torch.equal(sum(pair[side] for pair in bands), wide)


def test_the_wider_operand_is_split_first_and_then_the_other():
    wide, wider = wide_values(1, 8, 50, spread=6), wide_values(2, 9, 50, spread=25)
    for x, w in bands_of_exponents(wide, wider):
        assert x is wide
        for x_band, w_band in bands_of_exponents(x, w):
            assert w_band is w and bands_of_exponents(x_band, w_band) is None


def test_nothing_is_split_without_need_or_beside_what_is_not_finite():
    plain, wide = torch.ones(50, 100), wide_values(3, 9, 100)
    plain[0, 0] = 2.0**-60  # one of 5000
    assert bands_of_exponents(plain, torch.ones(3, 100)) is None
    assert bands_of_exponents(plain, torch.zeros(3, 100)) is None
    for special in (INF, NAN):
        plain[1, 1] = special
        assert bands_of_exponents(plain, wide) is None
