"""Launches the exact products: residues on int8 tensor cores, and the long accumulator for what they leave undecided.

The twin of `cpu.gemm`: the same functions, the same bits. See `cuda_src/residue_rows.cuh` for the algorithm. Nothing here
waits for the device, so a product can be captured in a CUDA graph.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..arithmetic.formats import NB, Format
from ..errors import InputError
from . import cuda_planner
from .cuda import DTYPES, FORMAT_CODES, Call, capability, launch, launch_all, multiprocessors, plain
from .cuda_layout import BLOCK, LIST_SIZE, Layout, capacity, ceil_div, layout_of, tiling

ENGINES = ("auto", "int8", "long_accumulator")

WORKSPACE_BYTES = 1 << 30
"""Scratch memory of one product; larger ones are cut into tiles."""

_THREADS = 256
_LONG_THREADS = 128
_FEWEST_PRODUCTS = 1 << 15
"""Smaller products take the long accumulator: one launch instead of four."""

_DIGITS_BYTES = 8 * NB
_FLAGGED_BLOCKS_A_MULTIPROCESSOR = 8


class _Operand(NamedTuple):
    """[batches, rows, terms] with unit stride in the terms."""

    tensor: torch.Tensor
    batches: int
    rows: int
    terms: int
    address: int
    code: int
    row_stride: int
    batch_stride: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Operand":
        if tensor.is_neg():
            tensor = plain(tensor)
        *batches, rows, terms = tensor.shape
        *batch_strides, row_stride, stride = tensor.stride()
        if stride != 1 and terms > 1:
            tensor = tensor.detach().contiguous()
            *batch_strides, row_stride, _ = tensor.stride()
        batch = (batches[0], batch_strides[0]) if batches else (1, 0)
        return _Operand(
            tensor, batch[0], rows, terms, tensor.data_ptr(), FORMAT_CODES[tensor.dtype], row_stride, batch[1]
        )

    def arguments(self, first_row: int) -> tuple[int, int, int, int]:
        """Address of a row, format, row stride, batch stride."""
        address = self.address + first_row * self.row_stride * self.tensor.element_size()
        return address, self.code, self.row_stride, self.batch_stride

    def matrices(self) -> Iterator[torch.Tensor]:
        """The contiguous matrices of the batch."""
        matrices = self.tensor if self.tensor.dim() == 3 else (self.tensor,)
        return (matrix.detach().contiguous() for matrix in matrices)


class _Target(NamedTuple):
    """Where a product goes: the kernels that finish it and the arguments that both end with, for a tile's first place."""

    name: str
    """The planner's name of the output: a format, or "digits"."""
    rebuild: str
    fallback: str
    arguments: Callable[[int, int], tuple[int, ...]]


def _parts(total: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, size):
        yield first, min(size, total - first)


def _multiply(index: int, layout: Layout, x_residues: int, w_residues: int, products: int) -> Call:
    sizes = (layout.moduli, layout.batches, layout.row_blocks, layout.column_blocks, layout.depth_blocks)
    arguments = (x_residues, w_residues, products, *sizes)
    if capability(index) == (9, 0):
        stages = 4 if layout.tile_columns == 2 * BLOCK else 6
        shared = 1024 + stages * BLOCK * (BLOCK + layout.tile_columns)
        blocks = (min(layout.tiles, multiprocessors(index)),)
        kernel = f"residue_gemm_{layout.tile_columns}"
        return Call("residue_gemm_hopper", kernel, blocks, 384, arguments, shared_bytes=shared)
    shared = 3 * 2 * BLOCK * BLOCK
    return Call("residue_gemm", "residue_gemm", (layout.tiles,), _THREADS, arguments, shared_bytes=shared)


def _tile_columns(moduli: int, batches: int, rows: int, columns: int, device_index: int) -> int:
    """256 where such tiles fill the device twice; they read shared memory less often."""
    tiles = moduli * batches * ceil_div(rows, BLOCK) * ceil_div(columns, 2 * BLOCK)
    return 2 * BLOCK if capability(device_index) == (9, 0) and tiles >= 2 * multiprocessors(device_index) else BLOCK


def _residue_product(x: _Operand, w: _Operand, moduli: int, workspace_bytes: int, target: _Target) -> torch.Tensor:
    """Run the residue engine tile by tile; returns the counts of undecided elements, int32 [tiles]."""
    device = x.tensor.device
    tile_columns = _tile_columns(moduli, x.batches, x.rows, w.rows, device.index)
    height, width = tiling(moduli, x.batches, x.rows, w.rows, x.terms, tile_columns, workspace_bytes)
    tiles = ceil_div(x.rows, height) * ceil_div(w.rows, width)
    flagged = torch.empty(tiles, dtype=torch.int32, device=device)
    counter = flagged.data_ptr()
    largest = layout_of(moduli, x.batches, height, width, x.terms, tile_columns)
    memory = torch.empty(largest.bytes, dtype=torch.uint8, device=device)
    # The arrays lie where the largest tile has them, so the residues of x stay while w goes by.
    at = largest.places(memory.data_ptr())
    x_residues, w_residues, x_facts, w_facts, products, flags, listed = at
    most = _FLAGGED_BLOCKS_A_MULTIPROCESSOR * multiprocessors(device.index)
    defines, longest = (("MODULI", moduli),), capacity(moduli)
    for i, rows in _parts(x.rows, height):
        for j, columns in _parts(w.rows, width):
            layout = layout_of(moduli, x.batches, rows, columns, x.terms, tile_columns)
            of_x, of_w = x.arguments(i), w.arguments(j)
            x_blocks = layout.convert_blocks(rows) if j == 0 else 0
            undone, end = (flags, listed, LIST_SIZE, counter), target.arguments(i, j)
            convert = (
                *of_x[:2], rows, *of_x[2:], layout.padded_rows, x_residues, x_facts, longest,
                *of_w[:2], columns, *of_w[2:], layout.padded_columns, w_residues, w_facts, longest,
                layout.batches, layout.terms, layout.depth_blocks, layout.team, x_blocks, counter,
            )  # fmt: skip
            rebuild = (
                products, x_facts, w_facts, layout.batches, rows, layout.padded_rows, columns, layout.padded_columns,
                *undone, *end,
            )  # fmt: skip
            fallback = (
                *of_x, *of_w, layout.row_units, layout.padded_rows, layout.padded_columns, layout.terms, *undone, *end,
            )  # fmt: skip
            blocks = (x_blocks + layout.convert_blocks(columns),)
            rebuild_blocks, fallback_blocks = (
                (ceil_div(layout.units * 32, _THREADS),),
                (min(ceil_div(layout.units, 4), most),),
            )
            calls = (
                Call("residue_convert", "residue_convert", blocks, _THREADS, convert, defines),
                _multiply(device.index, layout, x_residues, w_residues, products),
                Call("residue_round", target.rebuild, rebuild_blocks, _THREADS, rebuild, defines),
                Call("gemm", target.fallback, fallback_blocks, _LONG_THREADS, fallback),
            )
            launch_all(device, calls)
            counter += 4
    return flagged


def _planned_product(x: _Operand, w: _Operand, moduli: int | None, workspace_bytes: int, target: _Target) -> None:
    """Run the residue engine with the planner's guess, or with `moduli`."""
    if moduli is not None:
        _residue_product(x, w, moduli, workspace_bytes, target)
        return
    site = cuda_planner.Site(
        x.tensor.device.index, x.batches, x.rows, w.rows, x.terms, x.tensor.dtype, w.tensor.dtype, target.name
    )
    plan = cuda_planner.plan_of(site)
    guess = plan.moduli
    flagged = _residue_product(x, w, guess, workspace_bytes, target)
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
    device, stride = x.tensor.device, w.rows
    out = torch.empty((x.batches, x.rows, stride), dtype=DTYPES[form], device=device)
    bias_at, bias_code, bias_bytes = 0, 0, 0
    if bias is not None:
        bias = plain(bias).contiguous()
        bias_at, bias_code, bias_bytes = bias.data_ptr(), FORMAT_CODES[bias.dtype], bias.element_size()
    out_at, code, out_bytes = out.data_ptr(), FORMAT_CODES[out.dtype], out.element_size()
    if out.numel() == 0:
        pass
    elif _takes_residues(x, w, engine):

        def arguments(i: int, j: int) -> tuple[int, ...]:
            bias_place = bias_at + bias_bytes * j if bias_at else 0
            return bias_place, bias_code, out_at + out_bytes * (i * stride + j), code, stride, x.rows * stride

        rounding = "residue_round_plain" if bias_at == 0 and out.dtype is torch.float32 else "residue_round"
        target = _Target(form.name, rounding, "gemm_flagged", arguments)
        _planned_product(x, w, moduli, workspace_bytes, target)
    else:
        for one_x, one_w, one_out in zip(x.matrices(), w.matrices(), out, strict=True):
            launch(
                device, "gemm", "gemm", (ceil_div(one_out.numel(), 4),), _LONG_THREADS,
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
    device, stride = x.tensor.device, w.rows
    if x.rows * w.rows * x.terms == 0:
        return
    if _takes_residues(x, w, engine):

        def arguments(i: int, j: int) -> tuple[int, ...]:
            return digits.data_ptr() + _DIGITS_BYTES * (i * stride + j), stride, x.rows * stride

        target = _Target("digits", "residue_digits", "gemm_flagged_digits", arguments)
        _planned_product(x, w, moduli, workspace_bytes, target)
        return
    (one_x,), (one_w,) = x.matrices(), w.matrices()
    height = max(1, workspace_bytes // (_DIGITS_BYTES * w.rows))
    for i, rows in _parts(x.rows, height):
        partial = torch.empty((rows, w.rows, NB), dtype=torch.int64, device=device)
        launch(
            device, "gemm", "gemm_partial", (ceil_div(rows * w.rows, 4),), _LONG_THREADS,
            one_x[i:].data_ptr(), x.code, one_w.data_ptr(), w.code, partial.data_ptr(), rows, w.rows, x.terms,
        )  # fmt: skip
        digits[i : i + rows] += partial
