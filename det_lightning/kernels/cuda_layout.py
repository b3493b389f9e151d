"""A product's scratch memory and its tiles (see `cuda_src/residue_rows.cuh` and `cuda_src/residue_short.cu`)."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
"""The list of `cuda_src/residue.cuh`."""

BLOCK = 128
"""Rows, and terms, of a block of residues."""

USUAL_MODULI = 12

LIST_SIZE = 1 << 18
"""Undecided elements that are listed; beyond them, their flags are searched."""

CONVERT_THREADS = 256
_CONVERT_CHUNK = 16
"""Terms that a thread takes at a time where rows are converted."""

_NARROWEST = 1024
_SMALLEST = 2 * BLOCK
_UNIT_ROWS, _UNIT_COLUMNS = 16, 32
_HEAD_BYTES = 256
"""The counter of undecided elements, before all else."""

FLOAT64_TERMS = 16
"""Terms of a block of float64 residues (`cuda_src/residue_float64.cuh`)."""

CHANGING = 6
"""Fields of `cuda_src/product.cuh` that change from call to call, its first ones: x, w, bias, out, memory, barrier."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@functools.cache
def norm_scale(moduli: int, terms: int, share: float) -> float:
    """A row of integers whose squares sum up to at most 1 / norm_scale, before they are rounded to integers, has a norm of
    at most sqrt(share * P) after that, P the product of the moduli: two such rows have a sum of products of at most
    share * P.

    Rounding lengthens a row by sqrt(terms) / 2 at most. The kernel's sum of squares may be too small by 2^-20 of it.
    """
    longest = math.sqrt(math.prod(MODULI[:moduli]) * share) * (1 - 2**-20) - math.sqrt(terms) / 2
    return (1 + 2**-18) / longest**2


class Sizes(NamedTuple):
    """A product or a tile of one: out[b, i, j] = sum over k of x[b, i, k] w[b, j, k]."""

    batches: int
    rows: int
    columns: int
    terms: int


@dataclass(frozen=True)
class Layout:
    """A tile in memory."""

    moduli: int
    sizes: Sizes
    padded_rows: int
    padded_columns: int
    depth_blocks: int
    planes: int
    """Matrices of residues: one a modulus, or one a group of them."""
    team: int
    """Threads of a row where it is converted."""
    tile_columns: int
    """Columns of a tile of the integer product."""
    places: tuple[int, ...]
    """Of: counter, residues of x and of w, facts of x and of w, products, flags, list; the end."""

    @property
    def bytes(self) -> int:
        return self.places[-1]

    @property
    def row_blocks(self) -> int:
        return self.padded_rows // BLOCK

    @property
    def units(self) -> int:
        return self.sizes.batches * self.padded_rows * self.padded_columns // (_UNIT_ROWS * _UNIT_COLUMNS)

    @property
    def tiles(self) -> int:
        """Tiles of the integer product."""
        return self.planes * self.sizes.batches * self.row_blocks * (self.padded_columns // self.tile_columns)

    def convert_blocks(self, rows: int) -> int:
        return ceil_div(self.sizes.batches * rows * self.team, CONVERT_THREADS)

    def fields(self) -> tuple[int | float, ...]:
        """Fields of `cuda_src/product.cuh` from `moduli` to `depth_blocks`, then `team`."""
        return self.moduli, *self.sizes, self.padded_rows, self.padded_columns, self.depth_blocks, self.team


def _places(sizes: Sizes, padded_rows: int, padded_columns: int, *arrays: int) -> tuple[int, ...]:
    """Places of the counter, residues (two), facts, products, flags and the list; `arrays`: bytes of the residues of x and
    of w and of the products."""
    of_x, of_w, products = arrays
    x, w = sizes.batches * padded_rows, sizes.batches * padded_columns
    units = x * padded_columns // (_UNIT_ROWS * _UNIT_COLUMNS)
    listed = 8 * min(LIST_SIZE, sizes.batches * sizes.rows * sizes.columns)
    lengths = (_HEAD_BYTES, of_x, of_w, 16 * x, 16 * w, products, 64 * units, listed)
    return (0, *itertools.accumulate(_round_up(length, 256) for length in lengths))


@functools.lru_cache(maxsize=4096)
def layout_of(moduli: int, sizes: Sizes, tile_columns: int) -> Layout:
    """Blocks of 128 rows and terms."""
    padded_rows, padded_columns = _round_up(sizes.rows, BLOCK), _round_up(sizes.columns, max(tile_columns, BLOCK))
    depth_blocks = ceil_div(sizes.terms, BLOCK)
    team = min(1 << (depth_blocks * BLOCK // _CONVERT_CHUNK - 1).bit_length(), CONVERT_THREADS)
    x, w, depth = sizes.batches * padded_rows, sizes.batches * padded_columns, depth_blocks * BLOCK
    products = moduli * x * padded_columns
    places = _places(sizes, padded_rows, padded_columns, moduli * x * depth, moduli * w * depth, products)
    return Layout(moduli, sizes, padded_rows, padded_columns, depth_blocks, moduli, team, tile_columns, places)


def groups_of(moduli: int) -> int:
    """GROUPS of `cuda_src/residue.cuh`: matrices of float64 residues."""
    return ceil_div(moduli, 3)


@functools.lru_cache(maxsize=4096)
def float64_layout_of(moduli: int, sizes: Sizes) -> Layout:
    """Blocks of 128 rows and 16 terms of 8 bytes; products of 4."""
    padded_rows, padded_columns = _round_up(sizes.rows, BLOCK), _round_up(sizes.columns, BLOCK)
    depth_blocks, groups = ceil_div(sizes.terms, FLOAT64_TERMS), groups_of(moduli)
    team = min(1 << (depth_blocks - 1).bit_length(), CONVERT_THREADS)
    x, w = sizes.batches * padded_rows, sizes.batches * padded_columns
    a_row = 8 * groups * depth_blocks * FLOAT64_TERMS
    places = _places(sizes, padded_rows, padded_columns, a_row * x, a_row * w, 4 * groups * x * padded_columns)
    return Layout(moduli, sizes, padded_rows, padded_columns, depth_blocks, groups, team, BLOCK, places)


@functools.lru_cache(maxsize=4096)
def short_layout_of(moduli: int, sizes: Sizes) -> Layout:
    """Tiles of 32 rows of at most 64 or 128 terms."""
    depth = short_depth(sizes.terms)
    padded_rows, padded_columns = _round_up(sizes.rows, BLOCK), _round_up(sizes.columns, _UNIT_COLUMNS)
    x, w = sizes.batches * padded_rows, sizes.batches * padded_columns
    places = _places(sizes, padded_rows, padded_columns, moduli * x * depth, _round_up(moduli, 2) * w * depth, 0)
    team = depth // _CONVERT_CHUNK
    return Layout(moduli, sizes, padded_rows, padded_columns, 1, moduli, team, _UNIT_COLUMNS, places)


def short_depth(terms: int) -> int:
    """DEPTH of `cuda_src/residue_short.cu`."""
    return 64 if terms <= 64 else 128


def short_shared_bytes(moduli: int, terms: int) -> int:
    depth = short_depth(terms)
    return (BLOCK * moduli + 4 * 2 * _UNIT_COLUMNS) * depth


class Tile(NamedTuple):
    """Where a tile begins, and its sizes."""

    batch: int
    row: int
    column: int
    sizes: Sizes


def _parts(total: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, size):
        yield first, min(size, total - first)


def tiles_of(sizes: Sizes, bytes_of: Callable[[Sizes], int], workspace_bytes: int) -> list[Tile]:
    """The tiles, the largest first, that keep the scratch within `workspace_bytes`, or the smallest there are. Tiles of the
    same rows follow one another.

    `bytes_of`: the scratch of a tile of these sizes.
    """
    one = bytes_of(sizes._replace(batches=1))
    batches = min(sizes.batches, max(1, workspace_bytes // one))
    if batches > 1 and bytes_of(sizes._replace(batches=batches)) > workspace_bytes:
        batches -= 1
    height, width = sizes.rows, sizes.columns
    if batches == 1:
        height, width = _height_and_width(sizes._replace(batches=1), bytes_of, workspace_bytes)
    return [
        Tile(b, i, j, Sizes(some, rows, columns, sizes.terms))
        for b, some in _parts(sizes.batches, batches)
        for i, rows in _parts(sizes.rows, height)
        for j, columns in _parts(sizes.columns, width)
    ]


def most_terms(engine: str, workspace_bytes: int) -> int:
    """Of a product whose smallest tile keeps its residues within `workspace_bytes`, by the usual number of moduli."""
    bytes_a_residue = 8 * groups_of(USUAL_MODULI) if engine == "float64" else USUAL_MODULI
    return workspace_bytes // (bytes_a_residue * 2 * _SMALLEST) // BLOCK * BLOCK


def _height_and_width(sizes: Sizes, bytes_of: Callable[[Sizes], int], workspace_bytes: int) -> tuple[int, int]:
    """x is converted once, w once for every part of x, and narrow tiles leave the device half empty at their ends: so rows
    are cut only where fewer than _NARROWEST columns would fit beside them."""
    height = sizes.rows
    if bytes_of(sizes) <= workspace_bytes:
        return sizes.rows, sizes.columns
    while True:
        fixed = bytes_of(sizes._replace(rows=height, columns=_SMALLEST))
        a_step = bytes_of(sizes._replace(rows=height, columns=2 * _SMALLEST)) - fixed
        steps = 1 + max(0, workspace_bytes - fixed) // a_step
        width = min(sizes.columns, steps * _SMALLEST)
        if height <= _SMALLEST or (fixed <= workspace_bytes and width >= min(sizes.columns, _NARROWEST)):
            break
        height = _round_up(ceil_div(height, 2), _SMALLEST)
    parts = ceil_div(sizes.columns, width)
    return height, min(sizes.columns, _round_up(ceil_div(sizes.columns, parts), _SMALLEST))
