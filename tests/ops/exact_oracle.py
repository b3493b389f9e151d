"""Exact sums by Python fractions, and data on which sums that are not exact go wrong."""

import math
import random
from collections.abc import Iterable
from fractions import Fraction

import torch

from det_lightning.arithmetic.formats import FORMATS
from tests.arithmetic.nearest_float import nearest_float

NAN, INF, NEGATIVE_INF = float("nan"), float("inf"), float("-inf")
LARGEST, SMALLEST = (2.0 - 2.0**-23) * 2.0**127, 2.0**-149


def float32(patterns: Iterable[int]) -> torch.Tensor:
    """The float32 tensor of these unsigned patterns."""
    return torch.tensor(list(patterns), dtype=torch.int64).to(torch.int32).view(torch.float32)


def rounded(terms: list[float] | list[Fraction], dtype: torch.dtype, denominator: int | Fraction = 1) -> int:
    """Bits of the exact sum of `terms`, fractions or special floats, over `denominator`, rounded once to `dtype`."""
    form = FORMATS[str(dtype).removeprefix("torch.")]
    special = [t for t in terms if isinstance(t, float) and not math.isfinite(t)]
    if special:
        total = math.fsum(special) if len(set(map(str, special))) == 1 else NAN
        return form.nan_bits if math.isnan(total) else form.infinity_bits | (form.sign_bit if total < 0 else 0)
    return nearest_float(sum(map(Fraction, terms), Fraction(0)) / denominator, form)


def from_patterns(patterns: list[int], shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    return torch.tensor(patterns, dtype=torch.int64).to(integer).view(dtype).view(tuple(shape))


def product(a: float, b: float) -> float | Fraction:
    """a * b exactly, or the special value that IEEE gives."""
    return Fraction(a) * Fraction(b) if math.isfinite(a) and math.isfinite(b) else a * b


def exact_gemm(x, w, bias=None, dtype=torch.float32) -> torch.Tensor:
    """x @ w.T + bias by fractions, rounded once to `dtype`."""
    rows, columns = x.double().tolist(), w.double().tolist()
    extra = [0.0] * len(columns) if bias is None else bias.double().tolist()
    patterns = [
        rounded([product(a, b) for a, b in zip(r, c, strict=True)] + [e], dtype)
        for r in rows
        for c, e in zip(columns, extra, strict=True)
    ]
    return from_patterns(patterns, (len(rows), len(columns)), dtype)


def any_patterns(seed: int, *shape: int) -> torch.Tensor:
    """float32 of uniformly random bits: all exponents, NaNs and infinities among them."""
    rng = random.Random(seed)
    return float32(rng.getrandbits(32) for _ in range(math.prod(shape))).view(tuple(shape))


def wide_values(seed: int, *shape: int, spread: float = 12.0) -> torch.Tensor:
    """Finite float32 whose magnitudes span about 2^(3 * spread), some zero, some subnormal."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn(shape, generator=generator))
    values[torch.rand(shape, generator=generator) < 0.05] = 0.0
    subnormal = torch.rand(shape, generator=generator) < 0.02
    return torch.where(subnormal, torch.full((), 5 * SMALLEST), values)


def cancelling_pair(seed: int, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows x, w [1, terms] whose large products cancel exactly and leave a sum far below 2^-53 of them.

    Any sum in float64 loses what is left.
    """
    rng = random.Random(seed)
    half = terms // 2 - 1
    a = [rng.uniform(1, 2) * 2.0 ** rng.randrange(20, 40) for _ in range(half)]
    b = [rng.uniform(1, 2) * 2.0 ** rng.randrange(20, 40) for _ in range(half)]
    x, w = a + a + [3 * 2.0**-40, 2.0**-70], b + [-v for v in b] + [1.0, 1.0]
    order = rng.sample(range(len(x)), len(x))
    as_tensor = [torch.tensor([[values[i] for i in order]], dtype=torch.float32) for values in (x, w)]
    return as_tensor[0], as_tensor[1]
