"""The ways of an exact product through the kernels, and what each launches.

steps: a launch each for residues, integer products, rounding and what that left undecided (`residue_convert`,
    `residue_gemm`, `residue_round`, `gemm_flagged`); takes everything.
whole: all of it in one cooperative launch (`residue_whole`); for small products, which would wait between launches.
short: rows of at most 128 terms, as in attention: all moduli of a tile in one kernel (`residue_short`), which spares
    products of residues their way through memory.
windowed: as steps, to windowed digits (`residue_windowed`); what does not fit them is left to the caller.
The float64 engine takes steps and windowed, with another kernel for the products (`residue_gemm_float64`).
"""

from pathlib import Path
from typing import NamedTuple

from ..arithmetic.formats import NB
from . import cuda_compile
from .cuda import Call, capability, most_shared_bytes, multiprocessors, source_file
from .cuda_chain import Chain
from .cuda_layout import (
    BLOCK,
    CHANGING,
    CONVERT_THREADS,
    LIST_SIZE,
    USUAL_MODULI,
    Layout,
    Sizes,
    Tile,
    ceil_div,
    float64_layout_of,
    layout_of,
    norm_scale,
    short_depth,
    short_layout_of,
    short_shared_bytes,
    tiles_of,
)
from .cuda_planner import MAXIMUM_MODULI, MINIMUM_MODULI

PATHS = ("steps", "whole", "short", "windowed")

_FORMAT_BYTES = (4, 2, 2)
_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "digits": 0, "windowed": 0}
_OUT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "digits": 8 * NB, "windowed": 4}
_THREADS = 256
_FLAGGED_THREADS = 128
_SHARE, _WINDOWED_SHARE = 1 / 4, 31 / 64
"""Of the product of the moduli, for sums. Windowed digits use no quotient but that of `reconstruct` in cuda_src/residue.cuh:
half, less twice what it may be off."""

_FLAGGED_BLOCKS_A_MULTIPROCESSOR = 8
_HOPPER = (9, 0)
_HOPPER_THREADS = 384
_FLOAT64_STAGES = 3
_NARROW_TILES_COST = 0.56
"""Of the time of a wide one."""

_WHOLE_COLUMNS = 64
_WHOLE_SHARED_BYTES = 4 * (BLOCK * BLOCK + BLOCK * _WHOLE_COLUMNS)
_WHOLE_BLOCKS_A_MULTIPROCESSOR = 1
_MOST_WHOLE = 1 << 26
"""Multiply-adds; larger products take the kernels of each step."""

_LONGEST_SHORT = 128
_FEWEST_SHORT = 1 << 17
"""Results; fewer do not fill a device with tiles of 128 rows."""

_REST_BYTES = 32
"""Of Rests of `cuda_src/residue_rows.cuh`."""


class Form(NamedTuple):
    """What tells products of the same sizes apart: formats by their codes, strides in elements, -1 for no bias, and the
    output's format or "digits"."""

    x_code: int
    x_row_stride: int
    x_batch_stride: int
    w_code: int
    w_row_stride: int
    w_batch_stride: int
    bias_code: int
    out: str
    words: int = 0
    """Of windowed digits: words an element, and whether they are written, not added to."""
    fresh: bool = False
    plane: int = 0
    """From one word of an element to its next, in words."""


class Prepared(NamedTuple):
    """A product ready to launch: scratch bytes and, tile by tile, a chain and where its first elements of x, w, bias and
    out lie, in bytes."""

    bytes: int
    needs_barrier: bool
    counted: int
    """Of the two counts of a tile, which begin the scratch, the one of elements that took the operands themselves."""
    place_of_flags: int
    """In the scratch: int16, 32 for each unit."""
    padded_columns: int
    chains: list[tuple[Chain, int, int, int, int]]


def path_of(device_index: int, sizes: Sizes, form: Form) -> str:
    """The quickest way of a product with results of a format."""
    if form.out == "digits":
        return "steps"
    results = sizes.batches * sizes.rows * sizes.columns
    if form.bias_code < 0 and results >= _FEWEST_SHORT and _fits_short(device_index, USUAL_MODULI, sizes):
        return "short"
    if results * sizes.terms <= _MOST_WHOLE and most_shared_bytes(device_index) >= _WHOLE_SHARED_BYTES:
        return "whole"
    return "steps"


def _fits_short(device_index: int, moduli: int, sizes: Sizes) -> bool:
    return sizes.terms <= _LONGEST_SHORT and short_shared_bytes(moduli, sizes.terms) <= most_shared_bytes(device_index)


def prepare(
    device_index: int, sizes: Sizes, form: Form, moduli: int, path: str, workspace_bytes: int, engine: str = "int8"
) -> Prepared:
    """The chains of a product by a path; where that has no room for so many moduli, or the engine has no such path, by
    "steps"."""
    if engine == "float64" and path != "windowed":
        path = "steps"
    if path == "short" and (form.bias_code >= 0 or not _fits_short(device_index, moduli, sizes)):
        path = "steps"
    columns = _WHOLE_COLUMNS if path == "whole" else _tile_columns(moduli, sizes, device_index)

    def layout(of: Sizes) -> Layout:
        if engine == "float64":
            return float64_layout_of(moduli, of)
        return short_layout_of(moduli, of) if path == "short" else layout_of(moduli, of, columns)

    windowed = path == "windowed"  # a row's base is that of all its elements: one tile
    tiles = [Tile(0, 0, 0, sizes)] if windowed else tiles_of(sizes, lambda of: layout(of).bytes, workspace_bytes)
    # The arrays lie where the largest tile has them, so the residues of x stay while w goes by.
    places, counters = layout(tiles[0].sizes).places, _round_up(8 * len(tiles), 256)
    shifted = tuple(place + counters for place in places[1:-1])
    x_bytes, w_bytes = _FORMAT_BYTES[form.x_code], _FORMAT_BYTES[form.w_code]
    out_bytes, bias_bytes = _OUT_BYTES[form.out], _FORMAT_BYTES[max(form.bias_code, 0)]
    rests = places[-1] + counters
    rests_bytes = _REST_BYTES * (layout(sizes).padded_rows + layout(sizes).padded_columns) if windowed else 0
    batch_stride = form.plane if windowed else sizes.rows * sizes.columns
    share = _WINDOWED_SHARE if windowed else _SHARE
    chains = []
    for number, tile in enumerate(tiles):
        calls, columns_a_task, x_blocks = _calls(device_index, layout(tile.sizes), tile, form, path, engine)
        fixed = (
            *form[:6], max(form.bias_code, 0), _CODES[form.out], sizes.columns, batch_stride,
            *layout(tile.sizes).fields(), x_blocks, columns_a_task, norm_scale(moduli, sizes.terms, share),
            8 * number, *shifted, LIST_SIZE, rests, form.words, int(form.fresh),
        )  # fmt: skip
        chain = Chain(device_index, calls, CHANGING, fixed)
        b, i, j, _ = tile
        chains.append(
            (
                chain,
                x_bytes * (b * form.x_batch_stride + i * form.x_row_stride),
                w_bytes * (b * form.w_batch_stride + j * form.w_row_stride),
                bias_bytes * j,
                out_bytes * ((b * sizes.rows + i) * sizes.columns + j),
            )
        )
    flags, padded_columns = counters + places[6], layout(tiles[0].sizes).padded_columns
    return Prepared(rests + rests_bytes, path == "whole", int(path == "short"), flags, padded_columns, chains)


def variants() -> list[tuple[Path, dict[str, int]]]:
    """Every source with the macros that products may compile it with, those of the most code first."""
    numbers = range(MINIMUM_MODULI, MAXIMUM_MODULI + 1)
    short = [{"MODULI": moduli, "DEPTH": depth} for moduli in numbers for depth in (64, 128)]
    found = [("residue_short", defines) for defines in short]
    for name in ("residue_whole", "residue_round", "residue_gemm_float64", "residue_windowed", "residue_convert"):
        found += [(name, {"MODULI": moduli}) for moduli in numbers]
    for name in ("residue_round", "residue_windowed", "residue_convert"):
        found += [(name, {"MODULI": moduli, "FLOAT64_RESIDUES": 1}) for moduli in numbers]
    named = {name for name, _ in found}
    return [(source_file(name), defines) for name, defines in found] + [
        (source, {}) for source in cuda_compile.sources() if source.stem not in named
    ]


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def _calls(
    device_index: int, layout: Layout, tile: Tile, form: Form, path: str, engine: str
) -> tuple[list[Call], int, int]:
    """The launches of a tile, columns_a_task, and the blocks that convert x."""
    defines = (("MODULI", layout.moduli), *((("FLOAT64_RESIDUES", 1),) if engine == "float64" else ()))
    plain = "_plain" if form.out == "float32" and form.bias_code < 0 else ""
    all_of_x = layout.convert_blocks(tile.sizes.rows)
    x_blocks = all_of_x if tile.column == 0 else 0
    convert_blocks = (x_blocks + layout.convert_blocks(tile.sizes.columns),)
    if path == "whole":
        blocks = (_WHOLE_BLOCKS_A_MULTIPROCESSOR * multiprocessors(device_index),)
        name = f"residue_whole{plain}"
        whole = Call("residue_whole", name, blocks, _THREADS, (), defines, _WHOLE_SHARED_BYTES, cooperative=True)
        return [whole], 0, x_blocks
    most = _FLAGGED_BLOCKS_A_MULTIPROCESSOR * multiprocessors(device_index)
    digits = form.out == "digits"
    flagged_blocks = (min(ceil_div(layout.units, 4), most),)
    rest = Call("gemm", "gemm_flagged_digits" if digits else "gemm_flagged", flagged_blocks, _FLAGGED_THREADS, ())
    if path == "short":
        defines = (*defines, ("DEPTH", short_depth(tile.sizes.terms)))
        tasks, columns_a_task = _short_tasks(device_index, layout)
        shared = short_shared_bytes(layout.moduli, tile.sizes.terms)
        return [
            Call("residue_short", "residue_short_convert", convert_blocks, CONVERT_THREADS, (), defines),
            Call("residue_short", f"residue_short{plain}", (tasks,), _THREADS, (), defines, shared),
            Call("residue_short", "residue_short_flagged", (2 * multiprocessors(device_index),), _THREADS, (), defines),
        ], columns_a_task, x_blocks  # fmt: skip
    if path == "windowed":
        bases = Call(
            "residue_windowed", "residue_windowed_bases", (ceil_div(tile.sizes.rows, _THREADS),), _THREADS, (), defines
        )
        return [
            Call("residue_windowed", "residue_windowed_convert", convert_blocks, CONVERT_THREADS, (), defines),
            *([bases] if form.fresh else []),
            _multiply(device_index, layout, engine),
            Call("residue_windowed", "residue_windowed", (ceil_div(layout.units, 4),), 4 * 32, (), defines),
        ], 0, x_blocks  # fmt: skip
    rounding = "residue_digits" if digits else f"residue_round{plain}"
    return [
        Call("residue_convert", "residue_convert", convert_blocks, CONVERT_THREADS, (), defines),
        _multiply(device_index, layout, engine),
        Call("residue_round", rounding, (ceil_div(layout.units * 32, _THREADS),), _THREADS, (), defines),
        rest,
    ], 0, x_blocks  # fmt: skip


def _short_tasks(device_index: int, layout: Layout) -> tuple[int, int]:
    """Blocks of residue_short and the columns of each: as long as possible, yet a few rounds of blocks."""
    row_tiles, columns = layout.sizes.batches * layout.row_blocks, layout.padded_columns
    wanted = 5 * multiprocessors(device_index)
    parts = min(ceil_div(wanted, row_tiles), columns // 32)
    columns_a_task = _round_up(ceil_div(columns, parts), 32)
    return row_tiles * ceil_div(columns, columns_a_task), columns_a_task


def _multiply(device_index: int, layout: Layout, engine: str) -> Call:
    if engine == "float64":
        defines, shared = (("MODULI", layout.moduli),), _FLOAT64_STAGES * 2 * BLOCK * BLOCK
        return Call("residue_gemm_float64", "residue_gemm_float64", (layout.tiles,), _THREADS, (), defines, shared)
    if capability(device_index) == _HOPPER:
        stages = 4 if layout.tile_columns == 2 * BLOCK else 6
        shared = 1024 + stages * BLOCK * (BLOCK + layout.tile_columns)
        blocks = (min(layout.tiles, multiprocessors(device_index)),)
        kernel = f"residue_gemm_{layout.tile_columns}"
        return Call("residue_gemm_hopper", kernel, blocks, _HOPPER_THREADS, (), shared_bytes=shared)
    return Call("residue_gemm", "residue_gemm", (layout.tiles,), _THREADS, (), shared_bytes=3 * 2 * BLOCK * BLOCK)


def _tile_columns(moduli: int, sizes: Sizes, device_index: int) -> int:
    """128 or 256. The wider ones read shared memory less often, the others fill the device better at its end."""
    if capability(device_index) != _HOPPER:
        return BLOCK

    def rounds(columns: int) -> int:
        tiles = moduli * sizes.batches * ceil_div(sizes.rows, BLOCK) * ceil_div(sizes.columns, columns)
        return ceil_div(tiles, multiprocessors(device_index))

    return 2 * BLOCK if rounds(2 * BLOCK) <= _NARROW_TILES_COST * rounds(BLOCK) else BLOCK
