"""The integers of the float64 engine without a GPU: `cuda_src/residue_float64.cuh`, compiled for the host."""

import shutil
import subprocess
from pathlib import Path

import pytest

from det_lightning.kernels import cuda_compile

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("moduli", [4, 6, 9, 11, 12, 13, 14, 15, 16])
def test_integers_become_residues_and_their_sums_of_products_come_back(tmp_path, moduli):
    program = tmp_path / "residues"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wno-unknown-pragmas", f"-DMODULI={moduli}"]
    folders = [f"-I{HERE / 'emulator'}", f"-I{cuda_compile.SOURCE_FOLDER}"]
    subprocess.run([COMPILER, *flags, *folders, HERE / "float64_residues.cpp", "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True).stdout == "exact\n"
