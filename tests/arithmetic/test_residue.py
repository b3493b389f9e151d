"""Residues and the integers rebuilt from them, and the bounds that make float64 sums of products exact."""

import itertools
import random
from math import gcd, log2, prod

import pytest

from det_lightning.arithmetic.residue import (
    BLOCK_TERMS,
    MAXIMUM_MODULI,
    balanced_residue,
    capacity,
    fold,
    moduli,
    reconstruct,
)

COUNTS = range(1, MAXIMUM_MODULI + 1)


def test_moduli_are_odd_and_pairwise_coprime():
    chosen = moduli(MAXIMUM_MODULI)
    assert all(p % 2 == 1 for p in chosen)
    assert all(gcd(p, q) == 1 for p, q in itertools.combinations(chosen, 2))
    assert all(moduli(count) == chosen[:count] for count in COUNTS)


def test_a_block_of_products_stays_below_2_to_the_53():
    # A kernel's residue may pass (p - 1) / 2 by one half step of its rounding: one more on each side is allowed for.
    largest = max(moduli(MAXIMUM_MODULI)) // 2 + 1
    assert BLOCK_TERMS * largest**2 + largest < 2**53
    assert 2 * BLOCK_TERMS * largest**2 > 2**53


@pytest.mark.parametrize("count", COUNTS)
def test_capacity_is_a_quarter_of_the_product_of_the_moduli(count):
    exact = 16 * (log2(prod(moduli(count))) - 2)
    assert exact - 1 < capacity(count) <= exact


@pytest.mark.parametrize("count", COUNTS)
def test_every_integer_within_capacity_is_rebuilt(count):
    rng = random.Random(count)
    product = prod(moduli(count))
    edges = [0, 1, -1, product // 4, -(product // 4), product // 2, -(product // 2)]
    for value in edges + [rng.randrange(-product // 2 + 1, product // 2) for _ in range(300)]:
        coefficients = tuple(balanced_residue(value * f, p) for f, p in zip(fold(count), moduli(count), strict=True))
        assert reconstruct(coefficients) == value


def test_a_product_of_vectors_is_rebuilt_from_residues_of_its_factors():
    rng = random.Random(7)
    x, w = ([rng.randrange(-(1 << 45), 1 << 45) for _ in range(50)] for _ in range(2))
    coefficients = []
    for p, f in zip(moduli(5), fold(5), strict=True):
        terms = [balanced_residue(a, p) * balanced_residue(b * f, p) for a, b in zip(x, w, strict=True)]
        coefficients.append(balanced_residue(sum(terms), p))
    assert reconstruct(tuple(coefficients)) == sum(a * b for a, b in zip(x, w, strict=True))
