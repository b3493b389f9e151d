"""Exact products into windowed digits on tensor cores. `ops.gemm_windowed` says what it is for.

The elements that do not fit the window are found out on the device, left alone there and named: nothing is cut off.
"""

import math
import threading

import torch

from ..arithmetic.formats import NB
from ..arithmetic.windowed_digits import MAXIMUM_WORDS, WORD_BITS
from .cuda import FORMAT_CODES, launch
from .cuda_engine import engine_of
from .cuda_gemm import in_rows
from .cuda_layout import MODULI, Sizes, ceil_div, groups_of
from .cuda_paths import Form, Prepared, prepare

_LONG_THREADS = 128
_WORKSPACE_BYTES = 1 << 30
_MOST_SITES = 1024
_SPARE_BITS = 24
"""Of a new window, below the last places of the cut rows: for terms that reach further down."""


def moduli_for(x: torch.dtype, w: torch.dtype) -> int:
    """With these few terms of usual rows are cut; one fewer costs more in terms than it saves, one more the other way."""
    return 12 if x is torch.float32 or w is torch.float32 else 9


def words_for_product(x: torch.Tensor, w: torch.Tensor) -> int:
    """Words of a new window."""
    product_bits = math.log2(math.prod(MODULI[: moduli_for(x.dtype, w.dtype)]))
    return min(math.ceil((product_bits + _SPARE_BITS) / WORD_BITS), MAXIMUM_WORDS)


def rows_at_once(
    x: torch.Tensor, w: torch.Tensor, moduli: int, engine: str, workspace_bytes: int = _WORKSPACE_BYTES
) -> int:
    """Rows of x that keep the scratch within the bound, or 256."""
    residue, product = (8 * groups_of(moduli), 4 * groups_of(moduli)) if engine == "float64" else (moduli, moduli)
    fixed, a_row = residue * w.shape[0] * w.shape[1], product * w.shape[0] + residue * w.shape[1] + w.shape[0] // 8
    return max(256, (workspace_bytes - fixed) // a_row // 256 * 256)


class _Known(threading.local):
    def __init__(self):
        self.prepared: dict[tuple, Prepared] = {}


_known = _Known()


def add(
    x: torch.Tensor,
    w: torch.Tensor,
    words: torch.Tensor,
    base: torch.Tensor,
    fresh: bool,
    moduli: int | None = None,
    engine: str = "auto",
) -> torch.Tensor | None:
    """words [count, M, N] += x @ w.T on the bases, or = on bases that are chosen here if `fresh`.

    x: [M, K], w: [N, K], sizes above 0; words: int32, each words[j] contiguous; base: int64 [M]. Returns the elements
    i * N + j that were not added, int64 [n], or None; waits for the device to know that. `engine`: "auto", "int8" or
    "float64".
    """
    x, w = in_rows(x.detach()), in_rows(w.detach())
    moduli = moduli_for(x.dtype, w.dtype) if moduli is None else moduli
    engine = engine_of(x.get_device()) if engine == "auto" else engine
    left = []
    height = rows_at_once(x, w, moduli, engine)
    for first in range(0, x.shape[0], height):
        some = slice(first, first + height)
        part = _add_rows(words[:, some], base[some], x[some], w, fresh, moduli, engine)
        if part is not None:
            left.append(part + first * w.shape[0])
    return torch.cat(left) if left else None


def _add_rows(
    words: torch.Tensor,
    base: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    fresh: bool,
    moduli: int,
    engine: str,
) -> torch.Tensor | None:
    sizes = Sizes(1, x.shape[0], w.shape[0], x.shape[1])
    form = Form(
        FORMAT_CODES[x.dtype], x.stride(0), 0, FORMAT_CODES[w.dtype], w.stride(0), 0, -1, "windowed",
        words.shape[0], fresh, words.stride(0),
    )  # fmt: skip
    index = x.device.index
    key = (index, sizes, form, moduli, engine)
    ready = _known.prepared.get(key)
    if ready is None:
        if len(_known.prepared) >= _MOST_SITES:
            _known.prepared.clear()
        ready = _known.prepared[key] = prepare(index, sizes, form, moduli, "windowed", _WORKSPACE_BYTES, engine)
    memory = torch.empty(ready.bytes, dtype=torch.uint8, device=x.device)
    ((chain, *_),) = ready.chains
    chain.launch(x.data_ptr(), w.data_ptr(), base.data_ptr(), words.data_ptr(), memory.data_ptr(), 0)
    if int(memory[:4].view(torch.int32)) == 0:
        return None
    units = ceil_div(sizes.rows, 128) * 8 * (ready.padded_columns // 32)
    flags = memory[ready.place_of_flags : ready.place_of_flags + 64 * units].view(torch.int16)
    return _flagged_elements(flags, ready.padded_columns, sizes)


def _flagged_elements(flags: torch.Tensor, padded_columns: int, sizes: Sizes) -> torch.Tensor:
    """Numbers of the elements whose bits are set (see `cuda_src/residue_rows.cuh`)."""
    lanes = flags.nonzero()[:, 0]
    bits = torch.arange(16, device=flags.device)
    chosen = (flags[lanes, None].int() >> bits & 1).nonzero()
    lane, bit = lanes[chosen[:, 0]], chosen[:, 1]
    unit, owner = lane // 32, lane % 32
    row = unit // (padded_columns // 32) * 16 + owner // 4 + bit % 4 // 2 * 8
    column = unit % (padded_columns // 32) * 32 + bit // 4 * 8 + owner % 4 * 2 + bit % 2
    return row * sizes.columns + column


def digits_of(elements: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int64 [n, NB]: the elements i * N + j of x @ w.T, one by one."""
    x, w = in_rows(x.detach()), in_rows(w.detach())
    digits = torch.empty((elements.numel(), NB), dtype=torch.int64, device=x.device)
    launch(
        x.device, "gemm", "gemm_elements", (ceil_div(elements.numel(), 4),), _LONG_THREADS,
        x.data_ptr(), FORMAT_CODES[x.dtype], x.stride(0), w.data_ptr(), FORMAT_CODES[w.dtype], w.stride(0),
        w.shape[0], x.shape[1], elements.data_ptr(), elements.numel(), digits.data_ptr(),
    )  # fmt: skip
    return digits
