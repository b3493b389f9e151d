"""Kernels on disk: nothing is compiled by an import, Numba stays out of warm processes, cold ones may race."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from det_lightning.kernels.cpu import machine_code

ROOT = Path(__file__).resolve().parents[2]
CALL = """
import ctypes, sys
from det_lightning.kernels.cpu.machine_code import Kernel
state = (ctypes.c_int64 * 21)(-1)
Kernel("digits", "normalise_states")(0, 1, ctypes.addressof(state))
assert list(state)[:18] == [2**32 - 1] * 17 + [-1], list(state)
print("numba" in sys.modules)
"""


def python(code: str, cache: Path) -> subprocess.Popen:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return out.strip()


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory) -> Path:
    """A cache folder filled by several cold processes at once."""
    cache = tmp_path_factory.mktemp("cache")
    compiled = [output(process) for process in [python(CALL, cache) for _ in range(4)]]
    # The lock lets one process compile while the others wait for its file.
    assert sorted(compiled) == ["False", "False", "False", "True"]
    return cache


def object_files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.o"))


def test_cold_processes_that_race_leave_whole_files_and_no_litter(warm_cache):
    files = object_files(warm_cache)
    assert [file.name for file in files] == ["digits.normalise_states.o"]
    assert all(machine_code._checked(file.read_bytes()) for file in files)
    assert [f for f in warm_cache.rglob("*") if f.is_file() and f.suffix not in {".o", ".lock"}] == []


def test_a_warm_process_does_not_import_numba(warm_cache):
    assert output(python(CALL, warm_cache)) == "False"


def test_importing_the_operations_loads_no_compiler(tmp_path):
    code = """
import sys
import det_lightning.ops.gemm, det_lightning.ops.reduction, det_lightning.ops.elementary, det_lightning.ops.digits
print([name for name in ("numba", "llvmlite") if name in sys.modules])
"""
    assert output(python(code, tmp_path)) == "[]"
    assert object_files(tmp_path) == []


def test_a_damaged_file_is_compiled_again(warm_cache):
    file = object_files(warm_cache)[-1]
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-100])
        assert output(python(CALL, warm_cache)) == "True"
        assert file.read_bytes() == whole
    finally:
        file.write_bytes(whole)


def test_kernels_work_where_nothing_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "cache_folder", lambda: None)
    kernel = machine_code.Kernel("digits", "normalise_states")
    state = torch.tensor([[-1] + [0] * 20])
    kernel(0, 1, state.data_ptr())
    assert state[0, :18].tolist() == [2**32 - 1] * 17 + [-1]


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "other"))
    machine_code.cache_folder.cache_clear()
    try:
        first = machine_code.cache_folder()
        assert first.is_relative_to(tmp_path / "det_lightning")
        first.chmod(0o777)
        machine_code.cache_folder.cache_clear()
        assert machine_code.cache_folder().is_relative_to(tmp_path / "other")
    finally:
        machine_code.cache_folder.cache_clear()


def test_the_key_changes_with_any_source_of_kernels_or_arithmetic(tmp_path, monkeypatch):
    for folder in ("arithmetic", "kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(machine_code, "_PACKAGE", tmp_path)
    seen = {machine_code.source_digest()}
    for change in ("arithmetic/a.py", "kernels/a.py", "kernels/b.py"):
        (tmp_path / change).write_text("x = 2\n")
        seen.add(machine_code.source_digest())
    assert len(seen) == 4
