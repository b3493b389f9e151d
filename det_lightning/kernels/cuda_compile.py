"""Compile `cuda_src/` to cubins with NVRTC through ctypes: no GPU, no driver, no CuPy and no nvcc needed.

A kernel's identity is its name, flags, code and headers: `source_digest` and `nvrtc_version` belong into a
cache key and a ledger's header. `python -m det_lightning.kernels.cuda_compile` compiles every file for the
architectures that its first line names and prints one line a file.
"""

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import cuda_src
from ..errors import DetError

SOURCE_FOLDER = Path(cuda_src.__file__).resolve().parent
ARCHITECTURES_MARK = "// architectures:"
FLAGS = ("--std=c++17", "-fmad=false", "--device-int128", "--device-as-default-execution-space")
_NEWEST_MAJOR, _OLDEST_MAJOR = 13, 12


def sources() -> list[Path]:
    """The compilable files of `cuda_src/`, sorted by name."""
    return sorted(SOURCE_FOLDER.glob("*.cu"))


def named_architectures(source: Path) -> tuple[str, ...]:
    """The architectures that the first line of `source` names, such as ("sm_80", "sm_90")."""
    first_line = source.read_text(encoding="utf-8").partition("\n")[0]
    names = tuple(first_line.removeprefix(ARCHITECTURES_MARK).split())
    if not first_line.startswith(ARCHITECTURES_MARK) or not names:
        raise DetError(
            f"{source}: the first line is {first_line!r}; write '{ARCHITECTURES_MARK} sm_80 sm_90 ...' there."
        )
    return names


def source_digest() -> str:
    """SHA-256 (hex) of all of `cuda_src/`, names and contents, headers included, and of the compile flags."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in sorted(SOURCE_FOLDER.glob("*.cu*")):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _library_candidates() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    majors = range(_NEWEST_MAJOR, _OLDEST_MAJOR - 1, -1)
    from_wheels = [
        str(path)
        for major in majors
        for folder in folders
        for path in sorted(folder.glob(f"*/lib/libnvrtc.so.{major}"))
    ]
    from_system = [f"libnvrtc.so.{major}" for major in majors]
    found = ctypes.util.find_library("nvrtc")
    return from_wheels + from_system + ([found] if found else [])


@functools.cache
def _library() -> ctypes.CDLL:
    candidates = _library_candidates()
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise DetError(
        f"NVRTC, CUDA's run-time compiler, was not found (tried {', '.join(candidates)}). "
        f"Install it with `pip install nvidia-cuda-nvrtc`, or put CUDA's lib64 on LD_LIBRARY_PATH."
    )


def _check(status: int, what: str) -> None:
    if status != 0:
        get_error = _library().nvrtcGetErrorString
        get_error.restype = ctypes.c_char_p
        raise DetError(f"{what} failed: {get_error(status).decode()}.")


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use: two versions may emit different code for one source."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _text_or_bytes(program: ctypes.c_void_p, name: str) -> bytes:
    """What a pair of NVRTC functions `<name>Size` and `<name>` returns for `program`."""
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"{name}Size")(program, ctypes.byref(size)), f"{name}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), name)(program, buffer), name)
    return buffer.raw


def compile_with_log(source: Path, architecture: str, defines: Mapping[str, int] | None = None) -> tuple[bytes, str]:
    """(cubin, compiler log) of `source` for an architecture such as "sm_90"; the log holds the warnings.

    `defines`: macros that a source reads, such as {"MODULI": 11}; each has a default there.
    Raises DetError with NVRTC's log if the source does not compile.
    """
    program = ctypes.c_void_p()
    text = source.read_bytes()
    created = _library().nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    _check(created, f"nvrtcCreateProgram for {source}")
    try:
        options = [f"-arch={architecture}", f"-I{SOURCE_FOLDER}", *FLAGS]
        options += [f"-D{name}={value}" for name, value in (defines or {}).items()]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = _library().nvrtcCompileProgram(program, len(options), encoded)
        log = _text_or_bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != 0:
            raise DetError(f"{source} does not compile for {architecture} with NVRTC {nvrtc_version()}:\n{log}")
        return _text_or_bytes(program, "nvrtcGetCUBIN"), log
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))


def compile_cubin(source: Path, architecture: str, defines: Mapping[str, int] | None = None) -> bytes:
    """The cubin of `source`, fused multiply-adds off, subnormals kept. Raises DetError with the log."""
    return compile_with_log(source, architecture, defines)[0]


def _report(source: Path) -> tuple[bool, str]:
    """Whether `source` compiles for all its architectures without a warning, and the line that says so."""
    started = time.perf_counter()
    try:
        results = {name: compile_with_log(source, name) for name in named_architectures(source)}
    except DetError as error:
        return False, f"{source.name}: FAILED\n{error}"
    warnings = "\n".join(log for _, log in results.values() if log)
    if warnings:
        return False, f"{source.name}: WARNINGS\n{warnings}"
    sizes = " ".join(f"{name}={len(cubin)}B" for name, (cubin, _) in results.items())
    return True, f"{source.name}: {sizes} in {time.perf_counter() - started:.2f} s"


def main() -> int:
    """Compile every source for every architecture it names; 0 if all went without a warning, else 1."""
    try:
        major, minor = nvrtc_version()
    except DetError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"NVRTC {major}.{minor}, flags {' '.join(FLAGS)}, cuda_src {source_digest()[:16]}")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        reports = list(pool.map(_report, sources()))
    for sound, line in reports:
        print(line, file=sys.stdout if sound else sys.stderr)
    return 0 if reports and all(sound for sound, _ in reports) else 1


if __name__ == "__main__":
    raise SystemExit(main())
