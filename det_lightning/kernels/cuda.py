"""Launches the kernels of `cuda_src/` on torch's current stream and device: the only file that talks to CuPy.

A cubin is made by NVRTC once and kept on disk, in a folder whose name is a digest of all sources, the flags and the
compiler's version. Many processes may start at once: each writes aside and renames.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from ..arithmetic.formats import FORMATS
from ..errors import DetError
from . import cuda_compile

FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels call a format (`cuda_src/formats.cuh`)."""

DTYPES = {FORMATS["float32"]: torch.float32, FORMATS["bfloat16"]: torch.bfloat16, FORMATS["float16"]: torch.float16}

_OLDEST_CAPABILITY = (8, 0)
_functions: dict[tuple, object] = {}
_lock = threading.Lock()


@functools.cache
def _cupy() -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DetError(
            f"CUDA tensors need CuPy, which could not be imported ({error}); install the extra that fits your driver: "
            f"`pip install det-lightning[cuda13]` or `det-lightning[cuda12]`"
        ) from error


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """(major, minor) of a device. Raises DetError for one without int8 tensor cores."""
    found = torch.cuda.get_device_capability(device_index)
    if found < _OLDEST_CAPABILITY:
        raise DetError(
            f"cuda:{device_index} has compute capability {found[0]}.{found[1]}; the kernels need at least "
            f"{_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]}"
        )
    return found


@functools.cache
def multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def architecture(source: Path, device_index: int) -> str:
    """The target for which to compile `source`: the device's own, with the suffix "a" if the source asks for it."""
    own = "sm_{}{}".format(*capability(device_index))
    named = cuda_compile.named_architectures(source)
    return f"{own}a" if f"{own}a" in named and own not in named else own


@functools.cache
def cache_folder() -> Path:
    """The folder of the cubins of these sources, this compiler and these flags; a new one for this process if no place
    is this user's own and writable."""
    key = hashlib.sha256(f"{cuda_compile.source_digest()} {cuda_compile.nvrtc_version()}".encode()).hexdigest()[:24]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    roots = (os.path.join(home, "det_lightning"), os.path.join(tempfile.gettempdir(), f"det_lightning-{os.getuid()}"))
    for folder in (Path(root) / f"cubins-{key}" for root in roots):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A folder that another user could write must not feed code to this process.
            facts = folder.stat()
            if facts.st_uid == os.getuid() and not facts.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="det_lightning-cubins-"))


def cubin_path(source: Path, target: str, defines: Mapping[str, int]) -> Path:
    """The cubin of `source` for `target` on disk, compiled if it is not there yet."""
    suffix = "".join(f".{name}={value}" for name, value in sorted(defines.items()))
    path = cache_folder() / f"{source.stem}.{target}{suffix}.cubin"
    if not path.exists():
        cubin = cuda_compile.compile_cubin(source, target, defines)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as aside:
            aside.write(cubin)
        os.replace(aside.name, path)
    return path


def _function(device_index: int, source_name: str, kernel: str, defines: Mapping[str, int], shared_bytes: int):
    key = (device_index, source_name, kernel, *defines.items())
    found = _functions.get(key)
    if found is None:
        with _lock:
            source = cuda_compile.SOURCE_FOLDER / f"{source_name}.cu"
            path = cubin_path(source, architecture(source, device_index), defines)
            found = _cupy().RawModule(path=str(path)).get_function(kernel)
            if shared_bytes > 48 << 10:
                found.max_dynamic_shared_size_bytes = shared_bytes
            _functions[key] = found
    return found


@functools.lru_cache(maxsize=64)
def _stream(device_index: int, pointer: int):
    with warnings.catch_warnings():
        # Stream.from_external wants the protocol __cuda_stream__, which older versions of torch lack.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _cupy().cuda.ExternalStream(pointer, device_index)


def launch(
    device: torch.device,
    source: str,
    kernel: str,
    blocks: tuple[int, ...],
    threads: int,
    *arguments: int | float,
    defines: Mapping[str, int] | None = None,
    shared_bytes: int = 0,
) -> None:
    """Run `kernel` of `cuda_src/<source>.cu` on torch's current stream of `device`.

    Arguments are Python integers (sizes, codes, `tensor.data_ptr()`) and floats (float64). The caller keeps the tensors
    until the call returns: torch's allocator reuses memory in stream order. Raises DetError if the source does not
    compile or the device is too old.
    """
    index = device.index
    with _cupy().cuda.Device(index), _stream(index, torch.cuda.current_stream(index).cuda_stream):
        function = _function(index, source, kernel, defines or {}, shared_bytes)
        function(blocks, (threads,), arguments, shared_mem=shared_bytes)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its memory says: detached, no lazy negation."""
    return tensor.detach().resolve_neg()
