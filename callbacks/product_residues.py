"""Exact products verified modulo a prime, all elements at once, in about as many operations as the operands have elements.

With digits D of x @ w.T and a random vector r modulo p: D r = x (w.T r) modulo p (Freivalds, 1979). Floats are integers
times 2^-149 and digit j weighs 2^(32 j - 298), so both sides are integers times 2^-298. A flipped bit moves an element by a
power of two, which p never divides; another wrong row is overlooked once in 2^31 times, and a right one never accused.
"""

import torch

from det_lightning.arithmetic.formats import DIGITS, LOWEST_EXPONENT
from det_lightning.arithmetic.windowed_digits import WORD_BITS

PRIME = (1 << 31) - 1
"""2^31 = 1 modulo it, so powers of two are shifts by the exponent modulo 31."""

_AT_ONCE = 1 << 20
"""Elements whose digits are reduced together."""


def random_vector(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """int64 [count], each element from 1 to p - 1."""
    return torch.randint(1, PRIME, (count,), generator=generator).to(device)


def float_residues(x: torch.Tensor) -> torch.Tensor:
    """x 2^149 modulo p, int64 of x's shape. x: float32, bfloat16 or float16, finite."""
    bits = x.detach().to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
    exponent = bits >> 23 & 0xFF
    significand = (bits & 0x7FFFFF) | (exponent > 0).long() << 23
    magnitude = (significand << torch.clamp(exponent - 1, min=0) % 31) % PRIME
    return torch.where(bits < 0, (PRIME - magnitude) % PRIME, magnitude)


def project_digits(digits: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """D r modulo p. digits: int64 [M, N, NB] in any state; vector: int64 [N]. Returns int64 [M]."""
    places = torch.arange(DIGITS, device=digits.device)
    rows = max(1, _AT_ONCE // max(1, digits.shape[1]))
    found = []
    for part in digits.split(rows):
        # 32 j = j modulo 31, and j < 18: residues below 2^31 move to below 2^49.
        residues = ((part[..., :DIGITS] % PRIME) << places).sum(dim=-1) % PRIME
        found.append((residues * vector % PRIME).sum(dim=1) % PRIME)
    return torch.cat(found)


def project_words(words: torch.Tensor, base: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """D r modulo p of windowed digits. words: int32 [count, M, N]; base, vector: int64 [M], [N]. Returns int64 [M]."""
    places = WORD_BITS * torch.arange(words.shape[0], device=words.device)
    rows = max(1, _AT_ONCE // max(1, words.shape[2]))
    found = []
    for part, low in zip(words.split(rows, dim=1), base.split(rows), strict=True):
        shifts = (places[:, None] + low - LOWEST_EXPONENT) % 31
        residues = ((part.to(torch.int64) % PRIME << shifts[..., None]) % PRIME).sum(dim=0) % PRIME
        found.append((residues * vector % PRIME).sum(dim=1) % PRIME)
    return torch.cat(found)


def project_product(x: torch.Tensor, w: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """x (w.T r) modulo p, as 2^298 times that. x: [M, K], w: [N, K], finite; vector: int64 [N]. Returns int64 [M]."""
    inner = (float_residues(w) * vector[:, None] % PRIME).sum(dim=0) % PRIME
    return (float_residues(x) * inner % PRIME).sum(dim=1) % PRIME
