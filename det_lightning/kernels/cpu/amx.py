"""int8 matrix products of all moduli on AMX tiles (`native.amx_products`): twice the speed of the library's.

Used where the processor has them, the operating system lets this process use them, and a self-test finds every product
right. Otherwise the int8 engine takes `torch._int_mm`.
"""

import ctypes
import platform
from functools import cache

import numpy as np
import torch
from llvmlite import binding

from .machine_code import Kernel
from .threads import run_blocks

_amx_products_block = Kernel("amx_products", "amx_products_block")

SIDE, DEPTH, PANEL = 32, 64, 16
"""SIDE and DEPTH of `native.amx_products` and PANEL of `native.residues_int8`, which a warm process does not import."""

_BLOCK_BYTES = 1 << 19
"""Rows of the left operand that one thread keeps in its second cache."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _shapes() -> torch.Tensor:
    """The configuration that `tile_configure` loads: palette 1, every tile 16 rows of 64 bytes."""
    config = torch.zeros(64, dtype=torch.uint8)
    config[0] = 1
    config[16:32:2], config[48:56] = 64, 16
    return config


_CONFIG = _shapes()


def _permitted() -> bool:
    """Whether the operating system lets this process, and children that it forks, use the tiles."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-int8")):
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@cache
def is_available() -> bool:
    """Whether these products are to be had and right, found out at the first product."""
    if not _permitted():
        return False
    rng = np.random.default_rng(1)
    for rows, terms, columns in ((32, 64, 32), (96, 4096 + 128, 64)):
        x = rng.choice([-128, 127, 126], (2, rows, terms)).astype(np.int8)
        w = rng.choice([-128, 127, 125], (2, columns, terms)).astype(np.int8)
        x[0, 0], w[0, 0], x[1, 1], w[1, 1] = -128, -128, 127, 127
        packed = w.reshape(2, columns // 16, 16, terms // 4, 4).swapaxes(2, 3).copy()
        sums = torch.empty((2, rows, columns), dtype=torch.int32)
        products(torch.from_numpy(x), torch.from_numpy(packed), sums)
        if not np.array_equal(sums.numpy(), x.astype(np.int32) @ w.astype(np.int32).swapaxes(1, 2)):
            return False
    return True


def padded_sizes(rows: int, columns: int, terms: int) -> tuple[int, int, int]:
    """The sizes that `products` takes."""
    return -(-rows // SIDE) * SIDE, -(-columns // SIDE) * SIDE, -(-terms // DEPTH) * DEPTH


def products(x: torch.Tensor, w: torch.Tensor, sums: torch.Tensor) -> None:
    """sums[m] = x[m] @ w[m].T, int32 [count, rows, columns]; x and w as `native.amx_products` says."""
    count, rows, columns = sums.shape
    terms = x.shape[2]
    block_rows = max(SIDE, min(256, _BLOCK_BYTES // min(terms, 4096)) // SIDE * SIDE)
    units = count * -(-rows // block_rows)
    run_blocks(
        _amx_products_block, units, count * rows * columns * terms // 64,
        rows, columns, terms, block_rows, x.data_ptr(), w.data_ptr(), sums.data_ptr(), _CONFIG.data_ptr(),
        blocks_a_thread=8,
    )  # fmt: skip
