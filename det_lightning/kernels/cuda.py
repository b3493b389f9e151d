"""Launches the kernels of `cuda_src/` on torch's current stream and device: the only file that talks to the driver.

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
from collections.abc import Mapping, Sequence
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
_LAUNCH_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE

_functions: dict[tuple, tuple[ctypes.c_void_p, struct.Struct]] = {}
_lock = threading.Lock()


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DetError(
            f"CUDA tensors need the NVIDIA driver's library libcuda.so.1, which could not be loaded: {error}"
        ) from error
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
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
    _check(_driver().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    _check(
        _driver().cuDeviceGetAttribute(ctypes.byref(found), _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device),
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


@functools.cache
def _primary_context(device_index: int) -> int:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return context.value


def _enter(device_index: int) -> bool:
    """Make the context that torch uses on a device current on this thread, for a backward pass has threads of its own.
    True if another one was, which the caller brings back by `_leave`."""
    context, found = _primary_context(device_index), ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(found))
    if found.value == context:
        return False
    _check(_driver().cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "cuCtxPushCurrent")
    return True


def _leave() -> None:
    _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _file(source: str) -> Path:
    return cuda_compile.SOURCE_FOLDER / f"{source}.cu"


def _load(
    source: Path, device_index: int, kernel: str, defines: Mapping[str, int], shared_bytes: int
) -> ctypes.c_void_p:
    """The function `kernel` on a device, whose context is current."""
    path = cubin_path(source, architecture(source, device_index), defines)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = _driver().cuModuleLoadData(ctypes.byref(module), path.read_bytes())
    if status:  # a damaged file: make it again, once
        path.unlink(missing_ok=True)
        path = cubin_path(source, architecture(source, device_index), defines)
        status = _driver().cuModuleLoadData(ctypes.byref(module), path.read_bytes())
    _check(status, f"Loading {path}")
    _check(
        _driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), f"Finding {kernel} in {path}"
    )
    if shared_bytes > _STATIC_SHARED_BYTES:
        attribute = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        _check(attribute, f"Reserving {shared_bytes} bytes of shared memory for {kernel}")
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
    """All blocks run at once, so that they may wait for one another; of `Chain` only."""


def launch_all(device: torch.device, calls: Sequence[Call]) -> None:
    """Queue kernels, in order, on torch's current stream of `device`.

    The caller keeps the tensors until this returns: torch's allocator reuses memory in stream order. Raises DetError if
    a source does not compile, the device is too old, or the driver refuses a launch.
    """
    index, driver, own = device.index, _driver(), _arguments
    entered = _enter(index)
    try:
        stream = torch.cuda.current_stream(index).cuda_stream
        for source, kernel, blocks, threads, arguments, defines, shared_bytes, _ in calls:
            found = _functions.get((index, kernel, defines))
            if found is None:
                with _lock:
                    form = struct.Struct("".join("d" if isinstance(value, float) else "q" for value in arguments))
                    found = _load(_file(source), index, kernel, dict(defines), shared_bytes), form
                    _functions[index, kernel, defines] = found
            function, form = found
            form.pack_into(own.buffer, 0, *arguments)
            own.size.value = form.size
            y = blocks[1] if len(blocks) > 1 else 1
            status = driver.cuLaunchKernel(
                function, blocks[0], y, 1, threads, 1, 1, shared_bytes, stream, None, own.extra
            )  # fmt: skip
            if status:
                _check(status, f"Launching {kernel} with {blocks} blocks of {threads} threads")
    finally:
        if entered:
            _leave()


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_functions_of_chains: dict[tuple, ctypes.c_void_p] = {}


class Chain:
    """Kernels that follow one another with the same arguments, prepared once: a launch packs what changed and calls the
    driver once a kernel. One thread may use it.

    The first `changing` arguments, integers, come with each launch; `fixed` are those after them, integers and floats.
    """

    def __init__(self, device_index: int, calls: Sequence[Call], changing: int, fixed: Sequence[int | float]):
        self.calls = tuple(calls)
        self._index, self._driver = device_index, _driver()
        self._form = struct.Struct(f"{changing}q")
        form = struct.Struct("".join("d" if isinstance(value, float) else "q" for value in fixed))
        self._arguments = ctypes.create_string_buffer(8 * (changing + len(fixed)))
        form.pack_into(self._arguments, 8 * changing, *fixed)
        # The kernels have one parameter, a structure of these.
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments))
        self._cooperative = _Attribute(_LAUNCH_COOPERATIVE, 0, (ctypes.c_int * 16)(1))
        self._stream = None
        entered = _enter(device_index)
        try:
            self._steps = [self._step(call) for call in self.calls]
        finally:
            if entered:
                _leave()

    def _step(self, call: Call) -> tuple:
        key = (self._index, call.source, call.kernel, call.defines)
        with _lock:
            function = _functions_of_chains.get(key)
            if function is None:
                function = _load(_file(call.source), self._index, call.kernel, dict(call.defines), call.shared_bytes)
                _functions_of_chains[key] = function
        y = call.blocks[1] if len(call.blocks) > 1 else 1
        configuration = _Configuration(call.blocks[0], y, 1, call.threads, 1, 1, call.shared_bytes)
        if call.cooperative:
            configuration.attributes, configuration.attribute_count = ctypes.pointer(self._cooperative), 1
        return ctypes.addressof(configuration), function, configuration, call

    def launch(self, *changing: int) -> None:
        """Queue the kernels on torch's current stream of the device. The caller keeps tensors until this returns.
        Raises DetError if the driver refuses a launch."""
        self._form.pack_into(self._arguments, 0, *changing)
        entered = _enter(self._index)
        try:
            stream = current_stream(self._index)
            if stream != self._stream:
                for _, _, configuration, _ in self._steps:
                    configuration.stream = stream
                self._stream = stream
            launch_kernel, parameters = self._driver.cuLaunchKernelEx, self._parameters
            for configuration, function, _, call in self._steps:
                status = launch_kernel(configuration, function, parameters, None)
                if status:
                    _check(status, f"Launching {call.kernel} with {call.blocks} blocks of {call.threads} threads")
        finally:
            if entered:
                _leave()


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream."""
    # What torch's own compiler calls; it skips the object that the public function builds.
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return fast(device_index) if fast else torch.cuda.current_stream(device_index).cuda_stream


def launch(
    device: torch.device, source: str, kernel: str, blocks: tuple[int, ...], threads: int, *arguments: int | float
) -> None:
    """Queue one kernel: see `Call` and `launch_all`."""
    launch_all(device, (Call(source, kernel, blocks, threads, arguments),))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its memory says: detached, no lazy negation."""
    return tensor.detach().resolve_neg()
