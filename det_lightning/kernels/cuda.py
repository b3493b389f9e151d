"""Launches the kernels of `cuda_src/` on torch's current stream and device. It and `cuda_chain` alone talk to the driver.

A cubin is made by NVRTC once and kept on disk, in a folder whose name is a digest of all sources, the flags and the
compiler's version. Many processes may start at once: each writes aside and renames. The driver's library is called
directly: loading and launching need nothing else, and one launch costs a few microseconds.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ..arithmetic.formats import FORMATS
from ..errors import DetError
from . import cuda_compile

FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels call a format (`cuda_src/formats.cuh`)."""

DTYPES = {FORMATS["float32"]: torch.float32, FORMATS["bfloat16"]: torch.bfloat16, FORMATS["float16"]: torch.float16}

_OLDEST_CAPABILITY = (8, 0)
_MOST_ARGUMENTS = 40
_STATIC_SHARED_BYTES = 48 << 10

# Of the driver's interface.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

_functions: dict[tuple, tuple[ctypes.c_void_p, struct.Struct]] = {}
loading = threading.Lock()


@functools.cache
def driver_library() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DetError(
            f"CUDA tensors need the NVIDIA driver's library libcuda.so.1, which could not be loaded: {error}"
        ) from error
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


def check_status(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver_library().cuGetErrorString(status, ctypes.byref(text))
        raise DetError(f"{what} failed: {(text.value or b'unknown error').decode()} (CUDA error {status})")


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


@functools.cache
def most_shared_bytes(device_index: int) -> int:
    """The shared memory that one block may have."""
    device, found = ctypes.c_int(), ctypes.c_int()
    check_status(driver_library().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    check_status(
        driver_library().cuDeviceGetAttribute(ctypes.byref(found), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
        "cuDeviceGetAttribute",
    )
    return found.value


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


def compile_ahead(device_index: int, variants: Iterable[tuple[Path, Mapping[str, int]]]) -> None:
    """Have the cubins of (source, macros) on disk, compiled on all processors; sources for other devices are left out."""

    def compiled(source: Path, defines: Mapping[str, int]) -> None:
        target, named = architecture(source, device_index), cuda_compile.named_architectures(source)
        if target in named or not all(name.endswith("a") for name in named):
            cubin_path(source, target, defines)

    # NVRTC runs outside the interpreter's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: compiled(*one), variants))


@functools.cache
def _primary_context(device_index: int) -> int:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check_status(driver_library().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    check_status(driver_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return context.value


def enter_context(device_index: int) -> bool:
    """Make the context that torch uses on a device current on this thread, for a backward pass has threads of its own.
    True if another one was, which the caller brings back by `leave_context`."""
    context, found = _primary_context(device_index), ctypes.c_void_p()
    driver_library().cuCtxGetCurrent(ctypes.byref(found))
    if found.value == context:
        return False
    check_status(driver_library().cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "cuCtxPushCurrent")
    return True


def leave_context() -> None:
    driver_library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def source_file(source: str) -> Path:
    return cuda_compile.SOURCE_FOLDER / f"{source}.cu"


def load_function(
    source: Path, device_index: int, kernel: str, defines: Mapping[str, int], shared_bytes: int
) -> ctypes.c_void_p:
    """The function `kernel` on a device, whose context is current."""
    path = cubin_path(source, architecture(source, device_index), defines)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver_library().cuModuleLoadData(ctypes.byref(module), path.read_bytes())
    if status:  # a damaged file: make it again, once
        path.unlink(missing_ok=True)
        path = cubin_path(source, architecture(source, device_index), defines)
        status = driver_library().cuModuleLoadData(ctypes.byref(module), path.read_bytes())
    check_status(status, f"Loading {path}")
    check_status(
        driver_library().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()),
        f"Finding {kernel} in {path}",
    )
    if shared_bytes > _STATIC_SHARED_BYTES:
        attribute = driver_library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        check_status(attribute, f"Reserving {shared_bytes} bytes of shared memory for {kernel}")
    return function


class _Arguments(threading.local):
    """The memory through which one thread passes arguments: all of them in 8 bytes each, as the driver's `extra`."""

    def __init__(self):
        self.buffer = ctypes.create_string_buffer(8 * _MOST_ARGUMENTS)
        self.size = ctypes.c_size_t()
        pointer, size = ctypes.addressof(self.buffer), ctypes.addressof(self.size)
        self.extra = (ctypes.c_void_p * 5)(1, pointer, 2, size, 0)


_arguments = _Arguments()


class Call(NamedTuple):
    """One launch of `kernel` of `cuda_src/<source>.cu`.

    Arguments are Python integers (sizes, codes, `tensor.data_ptr()`) and floats (float64); every parameter of a kernel
    has 8 bytes.
    """

    source: str
    kernel: str
    blocks: tuple[int, ...]
    threads: int
    arguments: tuple[int | float, ...]
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    cooperative: bool = False
    """All blocks run at once, so that they may wait for one another; of `cuda_chain.Chain` only."""


def launch_all(device: torch.device, calls: Sequence[Call]) -> None:
    """Queue kernels, in order, on torch's current stream of `device`.

    The caller keeps the tensors until this returns: torch's allocator reuses memory in stream order. Raises DetError if
    a source does not compile, the device is too old, or the driver refuses a launch.
    """
    index, driver, own = device.index, driver_library(), _arguments
    entered = enter_context(index)
    try:
        stream = torch.cuda.current_stream(index).cuda_stream
        for source, kernel, blocks, threads, arguments, defines, shared_bytes, _ in calls:
            found = _functions.get((index, kernel, defines))
            if found is None:
                with loading:
                    form = struct.Struct("".join("d" if isinstance(value, float) else "q" for value in arguments))
                    found = load_function(source_file(source), index, kernel, dict(defines), shared_bytes), form
                    _functions[index, kernel, defines] = found
            function, form = found
            form.pack_into(own.buffer, 0, *arguments)
            own.size.value = form.size
            y = blocks[1] if len(blocks) > 1 else 1
            status = driver.cuLaunchKernel(
                function, blocks[0], y, 1, threads, 1, 1, shared_bytes, stream, None, own.extra
            )  # fmt: skip
            if status:
                check_status(status, f"Launching {kernel} with {blocks} blocks of {threads} threads")
    finally:
        if entered:
            leave_context()


def launch(
    device: torch.device, source: str, kernel: str, blocks: tuple[int, ...], threads: int, *arguments: int | float
) -> None:
    """Queue one kernel: see `Call` and `launch_all`."""
    launch_all(device, (Call(source, kernel, blocks, threads, arguments),))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its memory says: detached, no lazy negation."""
    return tensor.detach().resolve_neg()
