"""Scratch memory of products, kept from one to the next.

Fresh memory of many megabytes costs a page fault for every 4096 bytes, which is a good part of a product's time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT_BYTES = 256 << 20
"""No more than this stays allocated between two products."""

_kept: list[torch.Tensor] = []
"""At most one buffer. A product takes it out, so that two threads never share it."""


@contextmanager
def workspace(needed: int) -> Iterator[torch.Tensor]:
    """uint8 [at least `needed`], uninitialised, on a cache line; it must not be used after the block."""
    try:
        buffer = _kept.pop()
    except IndexError:
        buffer = None
    if buffer is None or buffer.numel() < needed:
        buffer = None  # give it back before the larger one is taken
        buffer = torch.empty(needed, dtype=torch.uint8)
    try:
        yield buffer
    finally:
        if buffer.numel() <= KEPT_BYTES and not _kept:
            _kept.append(buffer)


class Cutter:
    """Cuts arrays off a workspace, one after the other, each on a cache line."""

    def __init__(self, buffer: torch.Tensor):
        self._buffer, self._next = buffer, 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """An uninitialised array [*shape]."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        array = self._buffer[self._next : self._next + size].view(dtype).view(shape)
        self._next += padded(size)
        return array


def padded(size: int) -> int:
    """Bytes that an array of `size` bytes takes in a workspace."""
    return -(-size // 64) * 64
