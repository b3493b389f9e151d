"""Compiled kernels, kept on disk under a key that names everything their machine code depends on.

Numba's own cache misses changes in called functions and imported constants, so the folder is keyed by a digest of all
sources of `kernels/` and `arithmetic/`, of the compiler and of the processor. Numba writes each file aside and renames
it into place, and a kernel has one signature, so cold processes may race: they write the same bytes.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
from llvmlite import binding

_PACKAGE = Path(__file__).resolve().parents[2]


def source_digest() -> str:
    """Hex digest of the sources of `arithmetic/` and `kernels/`: it changes whenever a kernel's bits could."""
    digest = hashlib.sha256()
    for folder in ("arithmetic", "kernels"):
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _processor() -> str:
    features = binding.get_host_cpu_features().flatten()
    return f"{platform.machine()} {binding.get_host_cpu_name()} {features}"


def _private_folder(candidates: list[Path]) -> str:
    """The first candidate that this user owns and can write; "" if there is none, and kernels are not kept."""
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return str(folder)
        except OSError:
            continue
    return ""


def cache_folder() -> str:
    """Where compiled kernels of these sources, this compiler and this processor lie; "" if nowhere is writable."""
    versions = f"{platform.python_implementation()} {platform.python_version()} {numba.__version__} {llvmlite.__version__}"
    key = hashlib.sha256(f"{source_digest()} {versions} {_processor()}".encode()).hexdigest()[:24]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    roots = [numba.config.CACHE_DIR] if numba.config.CACHE_DIR else [os.path.join(home, "det_lightning")]
    roots.append(os.path.join(tempfile.gettempdir(), f"det_lightning-{os.getuid()}"))
    return _private_folder([Path(root) / f"kernels-{key}" for root in roots])


_FOLDER = cache_folder()


def kernel(function: Callable) -> Callable:
    """Compile `function` at its first call, without the interpreter lock, and keep the machine code on disk."""
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    if _FOLDER:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, _FOLDER
        try:
            compiled.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
    return compiled


def device_function(function: Callable) -> Callable:
    """Compile `function` as a part of the kernels that call it; it is not kept on its own."""
    return numba.njit(nogil=True, error_model="numpy")(function)
