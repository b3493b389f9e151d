"""Residues verify exact products: right ones always, and a wrong digit, operand or row never passes unseen here."""

import pytest
import torch
from det_lightning.callbacks.product_residues import (
    PRIME,
    float_residues,
    project_digits,
    project_product,
    random_vector,
)

from det_lightning.ops.gemm import add_gemm_digits, det_gemm_partial

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(8)


def operand(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes of the format, subnormal and largest ones too."""
    spread = {torch.float32: 120, torch.bfloat16: 120, torch.float16: 12}[dtype]
    exponents = torch.randint(-spread, spread, (rows, columns), generator=GENERATOR)
    x = torch.ldexp(torch.rand(rows, columns, generator=GENERATOR) - 0.5, exponents).to(dtype)
    x[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).smallest_normal / 8, torch.finfo(dtype).max]).to(dtype)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_residue_of_a_float_is_that_of_its_integer(dtype):
    x = operand(5, 9, dtype)
    expected = [int(value.double().item() * 2.0**149) % PRIME for value in x.flatten()]
    assert float_residues(x).flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 4), (9, 7, 33), (64, 5, 300)])
def test_a_right_product_is_never_accused(dtype, shape):
    m, n, k = shape
    x, w, vector = operand(m, k, dtype), operand(n, k, dtype), random_vector(n, GENERATOR, CPU)
    digits = det_gemm_partial(x, w)
    assert torch.equal(project_digits(digits, vector), project_product(x, w, vector))
    added = det_gemm_partial(w[:1].expand(m, k).contiguous(), w)  # any state, added to
    before = project_digits(added, vector)
    add_gemm_digits(added, x, w)
    assert torch.equal(project_digits(added, vector), (before + project_product(x, w, vector)) % PRIME)


def test_every_single_bit_of_the_digits_is_seen_in_its_row():
    x, w, vector = operand(3, 20, torch.float32), operand(4, 20, torch.float32), random_vector(4, GENERATOR, CPU)
    digits, expected = det_gemm_partial(x, w), project_product(x, w, vector)
    for place in range(18):
        for bit in range(63):
            changed = digits.clone()
            changed[1, 2, place] ^= 1 << bit
            assert (project_digits(changed, vector) != expected).tolist() == [False, True, False]


def test_a_change_of_an_operand_is_seen():
    x, w, vector = operand(3, 20, torch.float32), operand(4, 20, torch.float32), random_vector(4, GENERATOR, CPU)
    digits = det_gemm_partial(x, w)
    other = w.clone()
    other[3, 17] = torch.nextafter(other[3, 17], torch.tensor(9.0))
    assert bool((project_digits(digits, vector) != project_product(x, other, vector)).all())
