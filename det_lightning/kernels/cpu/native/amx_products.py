"""int8 matrix products on tile registers (AMX), for all moduli of an exact product in one launch."""

from .compiler import kernel
from .tiles import tile_configure, tile_dot, tile_load, tile_release, tile_store, tile_zero

SIDE = 32
"""Rows and columns of results that the registers hold: 2 x 2 tiles."""

DEPTH = 64
"""Terms of one tile."""

BLOCK_TERMS = 4096
"""Terms between two visits to a result in memory: a block of rows and a panel of columns stay in the second cache."""


@kernel
def amx_products_block(start, stop, rows, columns, terms, block_rows, x_at, w_at, sums_at, config_at):
    """sums[m, i, j] = sum over k of x[m, i, k] * w[m, j, k], int32 [count, rows, columns].

    Unit u of the block is `block_rows` rows of one modulus, row blocks running fastest. rows and columns are multiples
    of SIDE, terms of DEPTH. x: int8 [count, rows, terms]; w: int8 [count, columns / 16, terms / 4, 16, 4], so that one
    register takes 64 terms of 16 columns.
    """
    tile_configure(config_at)
    blocks = (rows + block_rows - 1) // block_rows
    for unit in range(start, stop):
        m, first = unit // blocks, unit % blocks * block_rows
        x_base, w_base, sums_base = (
            x_at + m * rows * terms,
            w_at + m * columns * terms,
            sums_at + 4 * m * rows * columns,
        )
        for k_block in range((terms + BLOCK_TERMS - 1) // BLOCK_TERMS):
            k_first = k_block * BLOCK_TERMS
            depth = (min(BLOCK_TERMS, terms - k_first)) // DEPTH
            for panel in range(columns // SIDE):
                w_upper = w_base + (SIDE * panel) * terms + 16 * k_first
                w_lower = w_upper + 16 * terms
                for row in range((min(block_rows, rows - first)) // SIDE):
                    i = first + SIDE * row
                    x_upper = x_base + i * terms + k_first
                    x_lower = x_upper + 16 * terms
                    out = sums_base + 4 * (i * columns + SIDE * panel)
                    below = out + 64 * columns
                    if k_block == 0:
                        tile_zero(0)
                        tile_zero(1)
                        tile_zero(2)
                        tile_zero(3)
                    else:
                        tile_load(0, out, 4 * columns)
                        tile_load(1, out + 64, 4 * columns)
                        tile_load(2, below, 4 * columns)
                        tile_load(3, below + 64, 4 * columns)
                    for d in range(depth):
                        tile_load(4, x_upper + DEPTH * d, terms)
                        tile_load(6, w_upper + 16 * DEPTH * d, 64)
                        tile_dot(0, 4, 6)
                        tile_load(7, w_lower + 16 * DEPTH * d, 64)
                        tile_dot(1, 4, 7)
                        tile_load(5, x_lower + DEPTH * d, terms)
                        tile_dot(2, 5, 6)
                        tile_dot(3, 5, 7)
                    tile_store(0, out, 4 * columns)
                    tile_store(1, out + 64, 4 * columns)
                    tile_store(2, below, 4 * columns)
                    tile_store(3, below + 64, 4 * columns)
    tile_release()
