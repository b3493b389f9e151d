"""Integers as residues modulo a few coprime numbers, sized so that float64 products of residues are exact.

For X and W with |sum over k of X[k] W[k]| <= P / 4, P the product of the moduli: reduce X and W modulo every p, sum the
products of residues in float64 (every partial sum is an integer below 2^53, so the order and fused multiply-adds cannot
matter), and rebuild the integer by the Chinese remainder theorem.
"""

from functools import cache
from math import gcd, prod

from .formats import FLOAT64

MODULUS_BITS = 22
BLOCK_TERMS_BITS = FLOAT64.significand_bits - 2 * (MODULUS_BITS - 1)
BLOCK_TERMS = 1 << BLOCK_TERMS_BITS
"""Products of residues that one float64 sum may hold: 2048."""

MAXIMUM_MODULI = 6
RECONSTRUCTED_BITS = 126
"""A reconstructed integer is smaller in magnitude than 2^126, so that arithmetic modulo 2^128 finds it."""


@cache
def moduli(count: int) -> tuple[int, ...]:
    """The `count` largest pairwise coprime odd numbers below 2^22 - 2^13.

    Ensures: with balanced residues |r| <= (p - 1) / 2, and one carried residue beside the products of a block,
    BLOCK_TERMS * r^2 + r < 2^53.
    """
    chosen: list[int] = []
    candidate = (1 << MODULUS_BITS) - (1 << 13) - 1
    while len(chosen) < count:
        if all(gcd(candidate, p) == 1 for p in chosen):
            chosen.append(candidate)
        candidate -= 2
    return tuple(chosen)


@cache
def capacity(count: int) -> int:
    """Floor of 16 * log2(P / 4) for `count` moduli: sums of a magnitude up to 2^(capacity / 16) are rebuilt."""
    return (prod(moduli(count)) ** 16).bit_length() - 1 - 32


def balanced_residue(value: int, modulus: int) -> int:
    """The residue of `value` that is nearest to zero; `modulus` is odd."""
    residue = value % modulus
    return residue - modulus if residue > modulus // 2 else residue


def fold(count: int) -> tuple[int, ...]:
    """Per modulus the balanced inverse of P / p. Multiplied into one operand, it makes the sums of products the
    coefficients t of `reconstruct`."""
    product = prod(moduli(count))
    return tuple(balanced_residue(pow(product // p, -1, p), p) for p in moduli(count))


def reconstruct(coefficients: tuple[int, ...]) -> int:
    """The integer v with |v| <= P / 2 and v = t * P / p modulo every p: sum t (P / p) - P * rint(sum t / p).

    A kernel may take the nearest integer in float64 and the rest modulo 2^128: |v| <= P / 4 keeps the sum of t / p at
    least 1/4 away from a tie, and |v| < 2^126 is all that has to fit.
    """
    chosen = moduli(len(coefficients))
    product = prod(chosen)
    total = sum(t * (product // p) for t, p in zip(coefficients, chosen, strict=True))
    return total - product * ((2 * total + product) // (2 * product))
