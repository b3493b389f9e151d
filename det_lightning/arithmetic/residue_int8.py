"""Integers as residues that fit int8, for int8 products summed in int32: `arithmetic.residue` with small moduli."""

from functools import cache
from math import gcd, prod

from .residue import RECONSTRUCTED_BITS, balanced_residue

LARGEST_MODULUS = 256
RESIDUE_LIMIT = LARGEST_MODULUS // 2
"""A balanced residue is at most this in magnitude; 128 modulo 256 is stored as -128."""

MAXIMUM_TERMS = (1 << 31) // RESIDUE_LIMIT**2 - 1
"""Products of residues that an int32 sum holds: 131071."""

MAXIMUM_MODULI = 17
"""Moduli whose product exceeds 2^(RECONSTRUCTED_BITS + 2)."""


@cache
def moduli(count: int) -> tuple[int, ...]:
    """The `count` largest pairwise coprime numbers up to 256, chosen greedily: 256, 255, 253, 251, 247, ..."""
    chosen: list[int] = []
    candidate = LARGEST_MODULUS
    while len(chosen) < count:
        if all(gcd(candidate, p) == 1 for p in chosen):
            chosen.append(candidate)
        candidate -= 1
    return tuple(chosen)


@cache
def capacity(count: int) -> int:
    """Floor of 16 * log2(P / 4), at most that of RECONSTRUCTED_BITS: sums up to 2^(capacity / 16) are rebuilt."""
    return min((prod(moduli(count)) ** 16).bit_length() - 1 - 32, 16 * RECONSTRUCTED_BITS)


def fold(count: int) -> tuple[int, ...]:
    """Per modulus the balanced inverse of P / p (see `arithmetic.residue.fold`)."""
    product = prod(moduli(count))
    return tuple(balanced_residue(pow(product // p, -1, p), p) for p in moduli(count))


def reconstruct(coefficients: tuple[int, ...]) -> int:
    """The integer v with |v| < P / 2 and v = t * P / p modulo every p (see `arithmetic.residue.reconstruct`)."""
    chosen = moduli(len(coefficients))
    product = prod(chosen)
    total = sum(t * (product // p) for t, p in zip(coefficients, chosen, strict=True))
    return total - product * ((2 * total + product) // (2 * product))
