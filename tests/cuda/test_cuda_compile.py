"""Compiling kernels needs NVRTC and nothing else: these tests run without a GPU."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from det_lightning.errors import DetError
from det_lightning.kernels import cuda, cuda_compile, cuda_paths

ELF = b"\x7fELF"


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        cuda_compile.nvrtc_version()
    except DetError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("source", cuda_compile.sources(), ids=lambda source: source.name)
def test_every_source_compiles_for_the_hopper_it_names_without_a_warning(source):
    (hopper,) = [name for name in cuda_compile.named_architectures(source) if name.startswith("sm_90")]
    cubin, log = cuda_compile.compile_with_log(source, hopper)
    assert cubin.startswith(ELF) and log == ""


@pytest.mark.parametrize("moduli", [4, 16])
@pytest.mark.parametrize(
    "name",
    ["residue_convert", "residue_round", "residue_short", "residue_whole", "residue_windowed", "residue_gemm_float64"],
)
def test_residues_compile_for_any_number_of_moduli(name, moduli):
    source = cuda_compile.SOURCE_FOLDER / f"{name}.cu"
    cubin, log = cuda_compile.compile_with_log(source, "sm_90", {"MODULI": moduli})
    assert cubin.startswith(ELF) and log == ""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["residue_convert", "residue_round", "residue_windowed"])
def test_what_stands_around_the_float64_products_compiles(name, architecture):
    source = cuda_compile.SOURCE_FOLDER / f"{name}.cu"
    cubin, log = cuda_compile.compile_with_log(source, architecture, {"MODULI": 12, "FLOAT64_RESIDUES": 1})
    assert cubin.startswith(ELF) and log == ""


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_what_is_compiled_ahead_is_for_the_device(monkeypatch, capability):
    compiled = []
    monkeypatch.setattr(cuda, "capability", lambda index: capability)
    monkeypatch.setattr(cuda, "cubin_path", lambda source, target, defines: compiled.append((source.stem, target)))
    cuda.compile_ahead(0, cuda_paths.variants())
    own = "sm_{}{}".format(*capability)
    targets = {"residue_gemm_hopper": "sm_90a"}
    assert all(target == targets.get(name, own) for name, target in compiled)
    assert ("residue_gemm_hopper" in dict(compiled)) == (capability == (9, 0))
    assert {source.stem for source in cuda_compile.sources()} - {"residue_gemm_hopper"} <= set(dict(compiled))


def _cubin_in_new_process(folder: str) -> bytes:
    code = (
        "from det_lightning.kernels import cuda, cuda_compile\n"
        "path = cuda.cubin_path(cuda_compile.SOURCE_FOLDER / 'digits.cu', 'sm_90', {})\n"
        "print(path, path.stat().st_size)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": folder}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout


def test_processes_that_start_at_once_share_one_sound_cubin(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        outputs = set(pool.map(_cubin_in_new_process, [str(tmp_path)] * 4))
    assert len(outputs) == 1
    (cubin,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cubin.read_bytes().startswith(ELF)


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_log(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text('// architectures: sm_90\n#include "formats.cuh"\nint64 f() { return digit; }\n')
    with pytest.raises(DetError, match=r'wrong\.cu(?s:.*)identifier "digit" is undefined'):
        cuda_compile.compile_cubin(source, "sm_90")


def test_a_source_without_architectures_is_refused(tmp_path):
    source = tmp_path / "silent.cu"
    source.write_text("// sm_90\n")
    with pytest.raises(DetError, match="architectures:"):
        cuda_compile.named_architectures(source)


def test_a_header_is_part_of_the_identity_of_every_kernel(tmp_path, monkeypatch):
    (tmp_path / "a.cu").write_text("// architectures: sm_90\n")
    (tmp_path / "a.cuh").write_text("constexpr int x = 1;\n")
    monkeypatch.setattr(cuda_compile, "SOURCE_FOLDER", tmp_path)
    before = cuda_compile.source_digest()
    (tmp_path / "a.cuh").write_text("constexpr int x = 2;\n")
    assert cuda_compile.source_digest() != before


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_compile, "_library_candidates", lambda: ["libnvrtc-of-nowhere.so"])
    cuda_compile._library.cache_clear()
    try:
        with pytest.raises(DetError, match="pip install nvidia-cuda-nvrtc"):
            cuda_compile.nvrtc_version()
    finally:
        cuda_compile._library.cache_clear()
