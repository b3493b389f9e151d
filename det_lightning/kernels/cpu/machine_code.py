"""Kernels as machine code on disk: found, made once, and called without Numba.

An object file lies in a folder whose name is a digest of everything it depends on: the sources of `kernels/` and
`arithmetic/`, the compiler's version, the processor. A process that finds the file loads it in milliseconds; one that
does not compiles it, aside, and renames it into place.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import struct
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

from llvmlite import binding

_PACKAGE = Path(__file__).resolve().parents[2]
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def source_digest() -> str:
    """Hex digest of the sources of `arithmetic/` and `kernels/`: it changes whenever a kernel's code could."""
    digest = hashlib.sha256()
    for folder in ("arithmetic", "kernels"):
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _build_key() -> str:
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite", "numpy"))
    processor = f"{platform.machine()} {binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    python = f"{platform.system()} {platform.python_implementation()} {platform.python_version()}"
    return hashlib.sha256(f"{source_digest()}|{versions}|{processor}|{python}".encode()).hexdigest()[:24]


@functools.cache
def cache_folder() -> Path | None:
    """The folder of this build's object files, made if need be; None if no place is this user's own and writable."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    roots = [os.path.join(home, "det_lightning"), os.path.join(tempfile.gettempdir(), f"det_lightning-{os.getuid()}")]
    for folder in (Path(root) / f"kernels-{_build_key()}" for root in roots):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A folder that another user could write must not feed machine code to this process.
            facts = folder.stat()
            if facts.st_uid == os.getuid() and not facts.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
    return None


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile while others wait for its file. Where locks are missing, several compile: no harm."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(family: str, name: str) -> bytes:
    return import_module(".native.compiler", __package__).object_code(family, name)


def _object_code(family: str, name: str) -> bytes:
    folder = cache_folder()
    if folder is None:
        return _compile(family, name)
    path = folder / f"{family}.{name}.o"
    with contextlib.suppress(FileNotFoundError):
        return _checked(path.read_bytes())
    with _one_at_a_time(folder / f"{family}.{name}.lock"):
        with contextlib.suppress(FileNotFoundError):
            return _checked(path.read_bytes())
        code = _compile(family, name)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as aside:
            aside.write(hashlib.sha256(code).digest() + code)
        os.replace(aside.name, path)
        return code


def _checked(content: bytes) -> bytes:
    """The object code behind its digest. A damaged file counts as missing: it is compiled again and replaced."""
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        raise FileNotFoundError("a kernel's object file is damaged")
    return code


@functools.cache
def _engine() -> binding.ExecutionEngine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


class Kernel:
    """One kernel: `native.<family>.<name>(start, stop, *arguments)`, made or loaded at its first call.

    Arguments are Python integers: sizes and addresses (`tensor.data_ptr()`). The interpreter lock is released.
    """

    def __init__(self, family: str, name: str):
        self.family, self.name = family, name
        self._entry = None

    def entry(self) -> ctypes._CFuncPtr:
        """The machine code, as `entry(start, stop, packed arguments)`."""
        if self._entry is None:
            with _lock:
                if self._entry is not None:  # another thread was first
                    return self._entry
                code = binding.ObjectFileRef.from_data(_object_code(self.family, self.name))
                engine = _engine()
                engine.add_object_file(code)
                engine.finalize_object()
                self._entry = _ENTRY(engine.get_function_address(self.name))
        return self._entry

    def __call__(self, start: int, stop: int, *arguments: int) -> int:
        return self.entry()(start, stop, pack(*arguments))


def pack(*arguments: int) -> bytes:
    """The arguments of a kernel as the memory that it reads: one int64 each."""
    return struct.pack(f"{len(arguments)}q", *arguments)
