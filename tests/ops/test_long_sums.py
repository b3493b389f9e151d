"""Products with very many terms, and batches of digits, against integers and fractions."""

from fractions import Fraction

import pytest
import torch

from det_lightning.errors import InputError
from det_lightning.kernels.cpu import gemm_int8
from det_lightning.ops.digits import det_combine, det_finalize, normalise_digits
from det_lightning.ops.gemm import det_gemm, det_gemm_partial
from det_lightning.ops.matmul import det_matmul, det_matmul_partial
from tests.ops.exact_oracle import from_patterns, rounded, wide_values
from tests.same_bits import assert_same_bits

ENGINES = ["auto", "float64", "long_accumulator", "int8"]
LENGTHS = [131071, 131072, 131073, (1 << 20) + 5]


def integer_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T rounded once, by Python integers in units of 2^-298."""

    def integers(row):
        return [(numerator << 149) // denominator for numerator, denominator in (v.as_integer_ratio() for v in row)]

    rows, columns = ([integers(row) for row in matrix.double().tolist()] for matrix in (x, w))
    unit = 2.0**-149
    sums = [sum(a * b for a, b in zip(r, c, strict=True)) for r in rows for c in columns]
    patterns = [rounded([Fraction(total) * Fraction(unit) ** 2], torch.float32) for total in sums]
    return from_patterns(patterns, (len(x), len(w)), torch.float32)


def operands(terms: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows each; the first products cancel all but the smallest term."""
    x, w = wide_values(terms, 2, terms, spread=2.0).to(dtype), wide_values(terms + 1, 2, terms, spread=2.0).to(dtype)
    half = terms // 2
    x[0, half : 2 * half], w[0, half : 2 * half] = -x[0, :half], w[0, :half]
    return x, w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", LENGTHS)
def test_long_sums_are_rounded_once_by_every_engine(terms, dtype):
    x, w = operands(terms, dtype)
    if terms > 200_000:
        x, w = x[:1], w[:1]
    expected = integer_gemm(x, w)
    for engine in ENGINES:
        if engine == "int8" and not gemm_int8.products_are_exact():
            continue
        assert_same_bits(det_gemm(x, w, engine=engine), expected)
    order = torch.randperm(terms, generator=torch.Generator().manual_seed(1))
    assert_same_bits(det_gemm(x[:, order], w[:, order]), expected)
    cut = 65_537
    parts = [det_gemm_partial(x[:, :cut], w[:, :cut]), det_gemm_partial(x[:, cut:], w[:, cut:])]
    assert_same_bits(det_finalize(det_combine(parts)), expected)
    assert not torch.equal((x.float() @ w.float().t())[0, 0], expected[0, 0])


@pytest.mark.parametrize(
    ("a", "b"),
    [((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 2)), ((2, 1, 3, 5), (4, 5, 2)), ((4, 3, 5), (5, 2)), ((0, 3, 5), (5, 2)),
     ((2, 3, 0), (2, 0, 4))],
    ids=str,
)  # fmt: skip
def test_digits_of_batches_are_those_of_the_product(a, b):
    x, w = wide_values(1, *a), wide_values(2, *b)
    digits = det_matmul_partial(x, w)
    expected = det_matmul(x, w)
    assert digits.shape[:-1] == expected.shape == torch.matmul(x, w).shape
    assert_same_bits(det_finalize(digits), expected)
    if x.shape[-1]:
        first = det_matmul_partial(x[..., :2], w[:2] if w.dim() == 1 else w[..., :2, :])
        second = det_matmul_partial(x[..., 2:], w[2:] if w.dim() == 1 else w[..., 2:, :])
        assert torch.equal(normalise_digits(det_combine([first, second])), digits)


def test_shapes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(InputError, match=r"det_matmul_partial: .* do not broadcast"):
        det_matmul_partial(torch.ones(2, 3, 4), torch.ones(3, 4, 5))
    with pytest.raises(InputError, match=r"det_matmul_partial: .* the last dimension of a"):
        det_matmul_partial(torch.ones(3, 4), torch.ones(3, 4))
