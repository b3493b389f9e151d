"""The kernels of products as they are shipped, compiled for the host and run there thread by thread: no GPU needed.

It runs threads in their order or in any other (`grid.h`), lets copies to shared memory come late, and notes addresses,
shifts and indices that a GPU does not take. What it cannot show: blocks that run beside each other, the hardware's own
tensor cores (their instructions are written down in `matrix_units.cuh` from PTX's manual), and the compiler for GPUs.
"""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

from det_lightning.kernels import cuda_compile

HERE = Path(__file__).resolve().parent


def _compiler() -> str | None:
    """g++ with 16-bit floats, if there is one."""
    path = shutil.which("g++")
    if path is None:
        return None
    version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True).stdout
    return path if int(version.split(".")[0]) >= 12 else None


COMPILER = _compiler()
FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-frounding-math", "-fno-strict-aliasing", "-w",
    "-U_FORTIFY_SOURCE", "-fsanitize=alignment,shift-exponent,bounds",
)  # fmt: skip

# PTX that a host does not have, and what it means.
PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=r"(wide) : "h"(static_cast<unsigned short>(bits)));': "wide = float_of_half(bits);",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(odd));': "bits = bfloat16_of(odd);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(odd));': "bits = half_of(odd);",
    'asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(scaled) : "r"(sum), "r"(m.reciprocal), "l"(1ll << 37));': (
        "scaled = static_cast<int64>(sum) * m.reciprocal + (1ll << 37);"
    ),
    'asm volatile("prefetch.global.L1 [%0];" ::"l"(facts));': "",
    'asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(share) : "memory");': (
        "*barrier += share;"
    ),
    'asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(barrier) : "memory");': "found = *barrier;",
    "extern __shared__ __align__(128) char memory[];": "char* memory = grid::shared;",
}


def build(program: str, library: Path, *macros: str) -> ctypes.CDLL:
    """A program that includes sources of the library's folder."""
    compiled = library.with_suffix(".o")
    command = [COMPILER, *FLAGS, *macros, f"-I{library.parent}", "-c", "-x", "c++", "-", "-o", compiled]
    subprocess.run(command, input=program, text=True, check=True)
    # Without the flags: what the checks call is in grid.h, and no library of the compiler's is needed for it.
    subprocess.run([COMPILER, "-shared", compiled, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fault.restype = ctypes.c_char_p
    return loaded


def check_faults(library: ctypes.CDLL, kernel: str) -> None:
    """After each launch: addresses that are no multiple of what is loaded from them, shifts, indices."""
    fault = library.fault()
    assert fault is None, f"{kernel}: an address, a shift or an index that is not allowed, first in {fault.decode()}"


class Emulator:
    """Libraries of kernels, in a folder of their own."""

    def __init__(self, folder: Path):
        self._folder, self._libraries = folder, {}
        text = {path.name: path.read_text(encoding="utf-8") for path in cuda_compile.SOURCE_FOLDER.glob("*.cu*")}
        everything = "".join(text.values())
        for ptx, meaning in PTX.items():
            assert ptx in everything, f"no source has {ptx!r} any more"
            text = {name: content.replace(ptx, meaning) for name, content in text.items()}
        text |= {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.*h")}
        for name, content in text.items():
            (folder / name).write_text(content, encoding="utf-8")

    def altered(self, folder: Path, source: str, before: str, after: str) -> "Emulator":
        """The same, but for one source in which a text stands in place of another."""
        other, path = Emulator(folder), folder / f"{source}.cu"
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{source} does not have {before!r} once"
        path.write_text(text.replace(before, after), encoding="utf-8")
        other._libraries = {key: library for key, library in self._libraries.items() if key[0] != source}
        return other

    def library(self, source: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        found = self._libraries.get((source, defines))
        if found is None:
            path = self._folder / f"{source}{''.join(f'.{name}{value}' for name, value in defines)}.so"
            program = f'#include "grid.h"\n#include "product.cuh"\n#include "{source}.cu"\n#include "launch.h"\n'
            macros = [f"-D{name}={value}" for name, value in defines]
            found = self._libraries[source, defines] = build(program, path, *macros)
        return found

    def chain(self, index: int, calls, changing: int, fixed) -> "EmulatedChain":
        """For `cuda_paths.Chain`."""
        return EmulatedChain(self, calls, fixed)


class EmulatedChain:
    disorder = 0
    """See `grid.h`."""

    def __init__(self, emulator: Emulator, calls, fixed):
        self.calls, self._emulator, self._fixed = calls, emulator, fixed

    def launch(self, *changing: int) -> None:
        values = (*changing, *self._fixed)
        form = "".join("d" if isinstance(value, float) else "q" for value in values)
        product = ctypes.create_string_buffer(struct.pack(form, *values))
        for call in self.calls:
            library = self._emulator.library(call.source, call.defines)
            kernel = ctypes.cast(getattr(library, call.kernel), ctypes.c_void_p)
            library.launch(kernel, call.blocks[0], call.threads, call.shared_bytes, self.disorder, product)
            check_faults(library, call.kernel)
