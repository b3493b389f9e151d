"""Launches the exact products: residues on int8 tensor cores, and the long accumulator for what they leave undecided.

The twin of `cpu.gemm`: the same functions, the same bits. See `cuda_src/residue.cu` for the algorithm. Nothing here
waits for the device, so a product can be captured in a CUDA graph.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..arithmetic.formats import NB, Format
from ..errors import InputError
from . import cuda_planner
from .cuda import DTYPES, FORMAT_CODES, capability, launch, multiprocessors, plain

ENGINES = ("auto", "int8", "long_accumulator")

WORKSPACE_BYTES = 1 << 30
"""Scratch memory of one product; larger ones are cut into tiles."""

MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
"""The list of `cuda_src/residue.cuh`."""

_BLOCK = 128
_THREADS = 256
_FEWEST_PRODUCTS = 1 << 15
"""Smaller products take the long accumulator: one launch instead of four."""

_DIGITS_BYTES = 8 * NB
_FLAGGED_BLOCKS_A_MULTIPROCESSOR = 8


@functools.cache
def capacity(moduli: int) -> float:
    """The longest (Euclidean) integer row: two of them have a sum of products of at most P / 4."""
    return math.sqrt(math.prod(MODULI[:moduli]) / 4) * (1 - 2**-20)


@dataclass(frozen=True)
class _Operand:
    """[batches, rows, terms] with unit stride in the terms."""

    tensor: torch.Tensor
    batches: int
    rows: int
    terms: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Operand":
        tensor = plain(tensor)
        if tensor.dim() == 2:
            tensor = tensor.unsqueeze(0)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        return _Operand(tensor, *tensor.shape)

    @property
    def code(self) -> int:
        return FORMAT_CODES[self.tensor.dtype]

    def part(self, first: int, rows: int) -> "_Operand":
        return _Operand(self.tensor[:, first : first + rows], self.batches, rows, self.terms)

    def arguments(self) -> tuple[int, int, int, int]:
        """Address, format, row stride, batch stride."""
        return self.tensor.data_ptr(), self.code, self.tensor.stride(1), self.tensor.stride(0)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b


@dataclass(frozen=True)
class _Shape:
    """Sizes of one tile in memory."""

    moduli: int
    batches: int
    rows: int
    columns: int
    terms: int
    tile_columns: int

    @property
    def padded_rows(self) -> int:
        return _round_up(self.rows, _BLOCK)

    @property
    def padded_columns(self) -> int:
        return _round_up(self.columns, self.tile_columns)

    @property
    def depth_blocks(self) -> int:
        return _ceil(self.terms, _BLOCK)

    @property
    def team(self) -> int:
        """Threads of a row in residue_convert."""
        return min(max(1 << (self.depth_blocks * 8 - 1).bit_length(), 8), _THREADS)

    @property
    def row_units(self) -> int:
        return self.batches * self.padded_rows // 16

    @property
    def column_units(self) -> int:
        return self.padded_columns // 32

    def sizes(self) -> tuple[int, ...]:
        """Bytes of: residues of x and of w, facts of x and of w, products, flags; each a multiple of 256."""
        x, w = self.batches * self.padded_rows, self.batches * self.padded_columns
        terms, units = self.depth_blocks * _BLOCK, self.row_units * self.column_units
        sizes = (
            self.moduli * x * terms,
            self.moduli * w * terms,
            16 * x,
            16 * w,
            self.moduli * units * 512,
            units * 64,
        )
        return tuple(_round_up(size, 256) for size in sizes)


def _tile_columns(moduli: int, batches: int, rows: int, columns: int, device_index: int) -> int:
    """256 where such tiles fill the device twice; they read shared memory less often."""
    tiles = moduli * batches * _ceil(rows, _BLOCK) * _ceil(columns, 2 * _BLOCK)
    return 2 * _BLOCK if capability(device_index) == (9, 0) and tiles >= 2 * multiprocessors(device_index) else _BLOCK


def _tiling(shape: _Shape, workspace_bytes: int) -> tuple[int, int]:
    """Rows and columns of the tiles that keep the scratch within `workspace_bytes`: x in few parts, w in more."""
    rows, columns = shape.rows, shape.columns
    step = 2 * _BLOCK

    def fits(r: int, c: int) -> bool:
        return (
            sum(_Shape(shape.moduli, shape.batches, r, c, shape.terms, shape.tile_columns).sizes()) <= workspace_bytes
        )

    while not fits(rows, columns) and (rows > step or columns > step):
        # The operand in more parts is converted once for every part of the other: split columns up to 4 times as often.
        if columns > step and (rows <= step or shape.columns / columns < 4 * shape.rows / rows):
            columns = _round_up(_ceil(columns, 2), step)
        else:
            rows = _round_up(_ceil(rows, 2), step)
    return rows, columns


def _parts(total: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, size):
        yield first, min(size, total - first)


def _multiply(device: torch.device, shape: _Shape, x_residues: int, w_residues: int, products: int) -> None:
    row_blocks, column_blocks = shape.padded_rows // _BLOCK, shape.padded_columns // _BLOCK
    tiles = shape.moduli * shape.batches * row_blocks * (shape.padded_columns // shape.tile_columns)
    sizes = (shape.moduli, shape.batches, row_blocks, column_blocks, shape.depth_blocks)
    if capability(device.index) == (9, 0):
        stages = 4 if shape.tile_columns == 256 else 6
        shared = 1024 + stages * _BLOCK * (_BLOCK + shape.tile_columns)
        blocks = min(tiles, multiprocessors(device.index))
        launch(
            device, "residue_gemm_hopper", f"residue_gemm_{shape.tile_columns}", (blocks,), 384,
            x_residues, w_residues, products, *sizes, shared_bytes=shared,
        )  # fmt: skip
    else:
        launch(
            device, "residue_gemm", "residue_gemm", (tiles,), _THREADS,
            x_residues, w_residues, products, *sizes, shared_bytes=3 * 2 * _BLOCK * _BLOCK,
        )  # fmt: skip


class _Workspace:
    """One allocation, cut into the arrays of `_Shape.sizes`."""

    def __init__(self, shape: _Shape, device: torch.device):
        sizes = shape.sizes()
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        starts = [self.memory.data_ptr()]
        for size in sizes[:-1]:
            starts.append(starts[-1] + size)
        self.x_residues, self.w_residues, self.x_facts, self.w_facts, self.products, self.flags = starts


def _residue_product(x: _Operand, w: _Operand, moduli: int, workspace_bytes: int, finish) -> torch.Tensor:
    """Run the residue engine tile by tile; returns the counts of undecided elements, int32 [tiles].

    finish(shape, workspace, flagged, x part, w part, first row, first column) queues the rounding and the rest.
    """
    device = x.tensor.device
    tile_columns = _tile_columns(moduli, x.batches, x.rows, w.rows, device.index)
    whole = _Shape(moduli, x.batches, x.rows, w.rows, x.terms, tile_columns)
    tile_rows, tile_width = _tiling(whole, workspace_bytes)
    tiles = _ceil(x.rows, tile_rows) * _ceil(w.rows, tile_width)
    flagged = torch.empty(tiles, dtype=torch.int32, device=device)
    space = _Workspace(_Shape(moduli, x.batches, tile_rows, tile_width, x.terms, tile_columns), device)
    counter = flagged.data_ptr()
    for i, height in _parts(x.rows, tile_rows):
        for j, width in _parts(w.rows, tile_width):
            shape = _Shape(moduli, x.batches, height, width, x.terms, tile_columns)
            part_x, part_w = x.part(i, height), w.part(j, width)
            blocks = [_ceil(shape.batches * rows * shape.team, _THREADS) for rows in (height if j == 0 else 0, width)]
            x_at, x_code, *x_strides = part_x.arguments()
            w_at, w_code, *w_strides = part_w.arguments()
            launch(
                device, "residue", "residue_convert", (sum(blocks),), _THREADS,
                x_at, x_code, height, *x_strides, shape.padded_rows, space.x_residues, space.x_facts, capacity(moduli),
                w_at, w_code, width, *w_strides, shape.padded_columns, space.w_residues, space.w_facts, capacity(moduli),
                shape.batches, shape.terms, shape.depth_blocks, shape.team, blocks[0], counter,
                defines={"MODULI": moduli},
            )  # fmt: skip
            _multiply(device, shape, space.x_residues, space.w_residues, space.products)
            finish(shape, space, counter, part_x, part_w, i, j)
            counter += 4
    return flagged


def _finish(device, shape: _Shape, space: _Workspace, counter: int, x: _Operand, w: _Operand, kernels, *target) -> None:
    """Queue the rebuilding kernel and, for what it leaves undecided, the long accumulator; `target` ends both calls."""
    rebuild, fallback = kernels
    launch(
        device, "residue", rebuild, (_ceil(shape.row_units * shape.column_units * 32, _THREADS),), _THREADS,
        space.products, space.x_facts, space.w_facts, shape.batches, shape.rows, shape.padded_rows,
        shape.columns, shape.padded_columns, space.flags, counter, *target,
        defines={"MODULI": shape.moduli},
    )  # fmt: skip
    units = _ceil(shape.row_units * shape.column_units, 4)
    launch(
        device, "gemm", fallback, (min(units, _FLAGGED_BLOCKS_A_MULTIPROCESSOR * multiprocessors(device.index)),), 128,
        *x.arguments(), *w.arguments(), shape.batches, shape.padded_rows, shape.padded_columns, shape.terms,
        space.flags, counter, *target,
    )  # fmt: skip


def _planned(x: _Operand, w: _Operand, out: str, moduli: int | None, workspace_bytes: int, finish) -> None:
    """Run the residue engine with the planner's guess, or with `moduli`."""
    if moduli is not None:
        _residue_product(x, w, moduli, workspace_bytes, finish)
        return
    site = cuda_planner.Site(
        x.tensor.device.index, x.batches, x.rows, w.rows, x.terms, x.tensor.dtype, w.tensor.dtype, out
    )
    plan = cuda_planner.plan_of(site)
    guess = plan.moduli
    flagged = _residue_product(x, w, guess, workspace_bytes, finish)
    if plan.wants_counts() and not torch.cuda.is_current_stream_capturing():
        plan.send(flagged, guess)


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise InputError(
            f"det_gemm: engine is {engine!r}; for CUDA tensors allowed: {', '.join(ENGINES)}; all give the same bits"
        )


def _takes_residues(x: _Operand, w: _Operand, engine: str) -> bool:
    products = x.batches * x.rows * w.rows * x.terms
    return products > 0 and (engine == "int8" or (engine == "auto" and products >= _FEWEST_PRODUCTS))


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    form: Format,
    engine: str = "auto",
    *,
    moduli: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:
    """The rounded products [M, N] of `ops.gemm.det_gemm`, or [B, M, N] of x [B, M, K] and w [B, N, K], on checked
    arguments. `engine`, `moduli` and `workspace_bytes` change the time only."""
    _check_engine(engine)
    batched = x.dim() == 3
    x, w = _Operand.of(x), _Operand.of(w)
    device = x.tensor.device
    out = torch.empty((x.batches, x.rows, w.rows), dtype=DTYPES[form], device=device)
    bias = None if bias is None else plain(bias).contiguous()
    bias_at, bias_code, bias_bytes = 0, 0, 0
    if bias is not None:
        bias_at, bias_code, bias_bytes = bias.data_ptr(), FORMAT_CODES[bias.dtype], bias.element_size()
    code, bytes_an_element = FORMAT_CODES[out.dtype], out.element_size()
    if out.numel() == 0:
        pass
    elif _takes_residues(x, w, engine):

        def finish(shape, space, counter, part_x, part_w, i, j):
            _finish(
                device, shape, space, counter, part_x, part_w, ("residue_round", "gemm_flagged"),
                bias_at and bias_at + bias_bytes * j, bias_code,
                out.data_ptr() + bytes_an_element * (i * w.rows + j), code, w.rows, x.rows * w.rows,
            )  # fmt: skip

        _planned(x, w, form.name, moduli, workspace_bytes, finish)
    else:
        for one_x, one_w, one_out in zip(x.tensor, w.tensor, out, strict=True):
            one_x, one_w = one_x.contiguous(), one_w.contiguous()
            launch(
                device, "gemm", "gemm", (_ceil(one_out.numel(), 4),), 128,
                one_x.data_ptr(), x.code, one_w.data_ptr(), w.code, bias_at, bias_code,
                one_out.data_ptr(), code, x.rows, w.rows, x.terms,
            )  # fmt: skip
    return out if batched else out[0]


def add_gemm_digits(
    digits: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    engine: str = "auto",
    *,
    moduli: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """digits [M, N, NB] += the products, on checked arguments; `digits` is contiguous. Each digit moves by less than
    2^32; a sum that starts at zero is not canonical before `cuda_reduction.normalise`."""
    _check_engine(engine)
    x, w = _Operand.of(x), _Operand.of(w)
    device = x.tensor.device
    if x.rows * w.rows * x.terms == 0:
        return
    if _takes_residues(x, w, engine):

        def finish(shape, space, counter, part_x, part_w, i, j):
            _finish(
                device, shape, space, counter, part_x, part_w, ("residue_digits", "gemm_flagged_digits"),
                digits.data_ptr() + _DIGITS_BYTES * (i * w.rows + j), w.rows, x.rows * w.rows,
            )  # fmt: skip

        _planned(x, w, "digits", moduli, workspace_bytes, finish)
        return
    one_w = w.tensor[0].contiguous()
    height = max(1, workspace_bytes // (_DIGITS_BYTES * w.rows))
    for i, rows in _parts(x.rows, height):
        one_x = x.tensor[0, i : i + rows].contiguous()
        partial = torch.empty((rows, w.rows, NB), dtype=torch.int64, device=device)
        launch(
            device, "gemm", "gemm_partial", (_ceil(rows * w.rows, 4),), 128,
            one_x.data_ptr(), x.code, one_w.data_ptr(), w.code, partial.data_ptr(), rows, w.rows, x.terms,
        )  # fmt: skip
        digits[i : i + rows] += partial
