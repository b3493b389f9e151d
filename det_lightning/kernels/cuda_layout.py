"""A product's scratch memory and its tiles (see `cuda_src/residue_rows.cuh`)."""

import functools
import math
from dataclasses import dataclass

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
"""The list of `cuda_src/residue.cuh`."""

BLOCK = 128
"""Rows, and terms, of a block of residues."""

LIST_SIZE = 1 << 18
"""Undecided elements that are listed; beyond them, their flags are searched."""

_CONVERT_THREADS = 256
_NARROWEST = 1024
_UNIT_ROWS, _UNIT_COLUMNS = 16, 32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@functools.cache
def capacity(moduli: int) -> float:
    """The longest (Euclidean) integer row: two of them have a sum of products of at most P / 4."""
    return math.sqrt(math.prod(MODULI[:moduli]) / 4) * (1 - 2**-20)


@dataclass(frozen=True)
class Layout:
    """One tile in memory."""

    moduli: int
    batches: int
    rows: int
    columns: int
    terms: int
    tile_columns: int

    padded_rows: int
    padded_columns: int
    depth_blocks: int
    team: int
    """Threads of a row in residue_convert."""
    sizes: tuple[int, ...]
    """Bytes of: residues of x and of w, facts of x and of w, products, flags, list."""

    @functools.cached_property
    def row_blocks(self) -> int:
        return self.padded_rows // BLOCK

    @functools.cached_property
    def column_blocks(self) -> int:
        return self.padded_columns // BLOCK

    @functools.cached_property
    def row_units(self) -> int:
        return self.batches * self.padded_rows // _UNIT_ROWS

    @functools.cached_property
    def units(self) -> int:
        return self.row_units * self.padded_columns // _UNIT_COLUMNS

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of the integer product."""
        return self.moduli * self.batches * self.row_blocks * (self.padded_columns // self.tile_columns)

    @functools.cached_property
    def bytes(self) -> int:
        return sum(self.sizes)

    def places(self, start: int) -> tuple[int, ...]:
        """The addresses of the arrays of `sizes`, one after another."""
        addresses = []
        for size in self.sizes:
            addresses.append(start)
            start += size
        return tuple(addresses)

    def convert_blocks(self, rows: int) -> int:
        return ceil_div(self.batches * rows * self.team, _CONVERT_THREADS)


@functools.lru_cache(maxsize=4096)
def layout_of(moduli: int, batches: int, rows: int, columns: int, terms: int, tile_columns: int) -> Layout:
    padded_rows, padded_columns = _round_up(rows, BLOCK), _round_up(columns, tile_columns)
    depth_blocks = ceil_div(terms, BLOCK)
    team = min(max(1 << (depth_blocks * 8 - 1).bit_length(), 8), _CONVERT_THREADS)
    x, w, depth = batches * padded_rows, batches * padded_columns, depth_blocks * BLOCK
    units = x * padded_columns // (_UNIT_ROWS * _UNIT_COLUMNS)
    listed = 8 * min(LIST_SIZE, batches * rows * columns)
    sizes = (moduli * x * depth, moduli * w * depth, 16 * x, 16 * w, 512 * moduli * units, 64 * units, listed)
    sizes = tuple(_round_up(size, 256) for size in sizes)
    return Layout(
        moduli, batches, rows, columns, terms, tile_columns, padded_rows, padded_columns, depth_blocks, team, sizes
    )


@functools.lru_cache(maxsize=4096)
def tiling(
    moduli: int, batches: int, rows: int, columns: int, terms: int, tile_columns: int, workspace_bytes: int
) -> tuple[int, int]:
    """Rows and columns of the tiles that keep the scratch within `workspace_bytes`, or the smallest there are.

    x is converted once, w once for every part of x, and narrow tiles leave the device half empty at their ends: so rows
    are cut only where fewer than _NARROWEST columns would fit beside them.
    """

    def bytes_of(height: int, width: int) -> int:
        return layout_of(moduli, batches, height, width, terms, tile_columns).bytes

    smallest, height = 2 * BLOCK, rows
    if bytes_of(rows, columns) <= workspace_bytes:
        return rows, columns
    while True:
        fixed = bytes_of(height, smallest)
        a_step = bytes_of(height, 2 * smallest) - fixed
        steps = 1 + max(0, workspace_bytes - fixed) // a_step
        width = min(columns, steps * smallest)
        if height <= smallest or (fixed <= workspace_bytes and width >= min(columns, _NARROWEST)):
            break
        height = _round_up(ceil_div(height, 2), smallest)
    parts = ceil_div(columns, width)
    return height, min(columns, _round_up(ceil_div(columns, parts), smallest))
