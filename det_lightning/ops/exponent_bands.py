"""Operands of a product split by exponents, exactly: x = sum of bands, each element in one band and zero in the others.

An int8 product cuts a row to some 42 bits and adds what it cut term by term. Where a row spans far more, as gradients behind
a softmax that is sure of its classes do, nearly every element has too many such terms: a product of each band has none.
"""

from collections.abc import Iterator

import torch

BAND_BITS = 16
"""Exponents of a band: with 24 bits of a float32 significand it stays within what a row is cut to."""

_FEW = 1 << 12
"""A row whose terms below its first band are fewer than this part needs no split."""


def bands_of_exponents(x: torch.Tensor, w: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
    """Pairs (band of x, w) or (x, band of w) whose products x @ w.T sum up to that of x and w.

    The operand with more terms below the first band of their rows is split. None if neither has more than a few, or if some
    element is not finite (zeros of a band would meet it). x: [M, K], w: [N, K], not empty. Waits for the device.
    """
    places = [_bands(each) for each in (x, w)]
    below = torch.stack([(place > 0).sum() / place.numel() for place in places])
    finite = torch.stack([torch.isfinite(each).all() for each in (x, w)])
    *shares, all_finite = torch.cat([below, finite.all().view(1)]).tolist()
    if not all_finite or max(shares) * _FEW < 1:
        return None
    side = shares.index(max(shares))
    place, operand = places[side], (x, w)[side]

    def split() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in place.unique().tolist():
            band = torch.where(place == number, operand, 0)
            yield (band, w) if side == 0 else (x, band)

    return split()


def _bands(operand: torch.Tensor) -> torch.Tensor:
    """Which band of its row each element lies in, from the largest exponent down; zeros are in the first."""
    exponents = torch.frexp(operand.float()).exponent
    exponents = torch.where(operand == 0, -(1 << 12), exponents)
    distance = exponents.amax(dim=1, keepdim=True) - exponents
    return torch.where(operand == 0, 0, distance // BAND_BITS).to(torch.int8)
