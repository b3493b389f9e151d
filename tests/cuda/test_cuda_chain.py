"""What a product launches, and with which arguments, without a GPU: the driver is a stand-in."""

import ctypes
import re
import struct
from itertools import product
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from det_lightning.errors import DetError  # noqa: E402
from det_lightning.kernels import cuda, cuda_chain, cuda_compile, cuda_layout, cuda_paths  # noqa: E402
from det_lightning.kernels.cuda import Call  # noqa: E402
from det_lightning.kernels.cuda_layout import CHANGING, Sizes  # noqa: E402
from det_lightning.kernels.cuda_paths import Form  # noqa: E402


def fields_of_a_product() -> list[str]:
    """Names of the fields of the structure in `product.cuh`, in order; each has eight bytes."""
    text = (cuda_compile.SOURCE_FOLDER / "product.cuh").read_text(encoding="utf-8")
    body = re.search(r"struct Product {(.*?)__device__", text, re.DOTALL)[1]
    declarations = re.sub(r"//.*", "", body).split(";")
    names = [re.sub(r".*?(?:int64|double|char\*|void\*) ", "", one.strip(), flags=re.DOTALL) for one in declarations]
    return [name.strip() for names_of_one in names for name in names_of_one.split(",") if name.strip()]


class Recorder:
    """A chain that remembers what it was made of."""

    def __init__(self, index, calls, changing, fixed):
        self.calls, self.changing, self.fixed = calls, changing, fixed


@pytest.fixture
def hopper(monkeypatch):
    """An H200 that is asked for its sizes only."""
    monkeypatch.setattr(cuda_paths, "capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda_paths, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(cuda_paths, "most_shared_bytes", lambda index: 232_448)
    monkeypatch.setattr(cuda_paths, "Chain", Recorder)


SITES = [
    (Sizes(1, 256, 256, 1024), Form(0, 1024, 0, 0, 1024, 0, -1, "float32"), "whole"),
    (Sizes(1, 4096, 4096, 4096), Form(1, 4096, 0, 0, 4096, 0, 2, "bfloat16"), "steps"),
    (Sizes(96, 1024, 1024, 64), Form(0, 64, 65536, 0, 64, 65536, -1, "float32"), "short"),
    (Sizes(1, 70, 60, 1000), Form(0, 1000, 0, 0, 1000, 0, -1, "digits"), "steps"),
    (Sizes(1, 70, 60, 1000), Form(0, 1000, 0, 0, 1000, 0, -1, "windowed", 5, True, 4200), "windowed"),
]


@pytest.mark.parametrize("engine", ["int8", "float64"])
@pytest.mark.parametrize(("sizes", "form", "path"), SITES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_arguments_are_the_fields_of_the_structure(hopper, sizes, form, path, engine):
    if form.out not in ("windowed",):
        assert cuda_paths.path_of(0, sizes, form) == path
    names = fields_of_a_product()
    ((chain, *_),) = cuda_paths.prepare(0, sizes, form, 11, path, 4 << 30, engine).chains
    assert chain.changing == CHANGING == names.index("x_format")
    given = dict(zip(names[CHANGING:], chain.fixed, strict=True))
    assert (given["batches"], given["rows"], given["columns"], given["depth"]) == sizes
    assert given["moduli"] == 11 and given["x_row_stride"] == sizes.terms
    assert isinstance(given["norm_scale"], float) and 0 < given["norm_scale"] < 1
    assert all(isinstance(value, int) for name, value in given.items() if name != "norm_scale")
    assert given["words"] == form.words and given["fresh"] == form.fresh


def test_every_kernel_that_a_path_names_is_in_its_source(hopper):
    for (sizes, form, path), engine in product(SITES, ("int8", "float64")):
        for chain, *_ in cuda_paths.prepare(0, sizes, form, 11, path, 1 << 30, engine).chains:
            for call in chain.calls:
                text = (cuda_compile.SOURCE_FOLDER / f"{call.source}.cu").read_text(encoding="utf-8")
                assert re.search(rf"\b{call.kernel}\(const __grid_constant__ Product p\)", text), call.kernel


def test_both_engines_differ_in_the_products_and_in_what_stands_around_them(hopper):
    sizes, form = Sizes(1, 300, 200, 1000), Form(0, 1000, 0, 0, 1000, 0, -1, "float32")
    of = {}
    for engine in ("int8", "float64"):
        ((chain, *_),) = cuda_paths.prepare(0, sizes, form, 11, "steps", 1 << 30, engine).chains
        of[engine] = chain.calls
    assert [call.kernel for call in of["int8"]] == [
        "residue_convert", "residue_gemm_128", "residue_round_plain", "gemm_flagged"
    ]  # fmt: skip
    assert [call.kernel for call in of["float64"]] == [
        "residue_convert", "residue_gemm_float64", "residue_round_plain", "gemm_flagged"
    ]  # fmt: skip
    convert, multiply, rounding, _ = of["float64"]
    assert convert.defines == rounding.defines == (("MODULI", 11), ("FLOAT64_RESIDUES", 1))
    assert multiply.blocks == (4 * 3 * 2,), "one matrix for every three moduli"
    assert all(dict(call.defines).get("FLOAT64_RESIDUES") is None for call in of["int8"])


def test_the_scratch_of_the_float64_engine_holds_its_residues_and_its_sums():
    layout = cuda_layout.float64_layout_of(12, Sizes(2, 130, 300, 50))
    _, x, w, facts, _, products, flags, *_ = layout.places
    assert (layout.padded_rows, layout.padded_columns, layout.depth_blocks, layout.planes) == (256, 384, 4, 4)
    assert w - x == 4 * 2 * 256 * 64 * 8 and facts - w == 4 * 2 * 384 * 64 * 8
    assert flags - products == 4 * 2 * 256 * 384 * 4


def test_tiles_of_a_small_workspace_cover_the_product_once(hopper):
    sizes, form = Sizes(5, 700, 900, 300), Form(0, 300, 210_000, 0, 300, 270_000, -1, "float32")
    for workspace_bytes in (1, 1 << 20, 20 << 20, 1 << 30):
        ready = cuda_paths.prepare(0, sizes, form, 11, "steps", workspace_bytes)
        names, covered = fields_of_a_product()[CHANGING:], torch.zeros(5, 700, 900, dtype=torch.int32)
        for chain, of_x, of_w, _, of_out in ready.chains:
            given = dict(zip(names, chain.fixed, strict=True))
            batch, place = divmod(of_out // 4, 700 * 900)
            row, column = divmod(place, 900)
            assert of_x == 4 * (batch * 210_000 + row * 300) and of_w == 4 * (batch * 270_000 + column * 300)
            assert (given["x_blocks"] > 0) == (column == 0)
            part = (slice(batch, batch + given["batches"]), slice(row, row + given["rows"]))
            covered[(*part, slice(column, column + given["columns"]))] += 1
        assert bool((covered == 1).all())


@pytest.fixture
def launches(monkeypatch):
    """(what a stand-in for the driver was given at each launch, its next status)."""
    seen, status = [], [0]

    def launch(configuration, function, parameters, extra):
        found = cuda_chain._Configuration.from_address(configuration)
        seen.append(
            (function, found.grid_x, found.block_x, found.shared, found.stream, found.attribute_count, parameters[0])
        )
        return status[0]

    driver = SimpleNamespace(cuLaunchKernelEx=launch, cuGetErrorString=lambda code, text: 0)
    monkeypatch.setattr(cuda, "driver_library", lambda: driver)
    monkeypatch.setattr(cuda_chain, "driver_library", lambda: driver)
    monkeypatch.setattr(cuda_chain, "enter_context", lambda index: False)
    monkeypatch.setattr(
        cuda_chain, "load_function", lambda source, index, kernel, defines, shared: f"{source.stem}:{kernel}"
    )
    monkeypatch.setattr(cuda_chain, "current_stream", lambda index: 77)
    monkeypatch.setattr(cuda_chain, "_functions_of_chains", {})
    return seen, status


def test_a_chain_packs_what_changed_and_launches_its_kernels_in_order(launches):
    seen, _ = launches
    calls = [
        Call("gemm", "first", (3,), 128, (), shared_bytes=5),
        Call("residue_whole", "second", (4,), 256, (), cooperative=True),
    ]
    chain = cuda_chain.Chain(0, calls, 2, (7, 0.5, -9))
    for changing in ((1, 2), (-3, 1 << 62)):
        chain.launch(*changing)
        (first, second), seen[:] = seen[-2:], []
        assert first[:6] == ("gemm:first", 3, 128, 5, 77, 0) and second[:6] == (
            "residue_whole:second",
            4,
            256,
            0,
            77,
            1,
        )
        memory = ctypes.string_at(first[6], 40)
        assert struct.unpack("qqqdq", memory) == (*changing, 7, 0.5, -9) and first[6] == second[6]


def test_a_launch_that_the_driver_refuses_is_an_error_that_names_the_kernel(launches):
    _, status = launches
    chain = cuda_chain.Chain(0, [Call("gemm", "first", (3,), 128, ())], 1, ())
    status[0] = 701
    with pytest.raises(DetError, match=r"Launching first with \(3,\) blocks of 128 threads failed"):
        chain.launch(1)
