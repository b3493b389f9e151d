"""Kernels that are launched again and again with arguments that hardly change: what a product of a call site is made of."""

import ctypes
import struct
from collections.abc import Sequence

import torch

from .cuda import (
    Call,
    check_status,
    driver_library,
    enter_context,
    leave_context,
    load_function,
    loading,
    source_file,
)

_LAUNCH_COOPERATIVE = 2
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE of the driver's interface."""


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
        self._index, self._driver = device_index, driver_library()
        self._form = struct.Struct(f"{changing}q")
        form = struct.Struct("".join("d" if isinstance(value, float) else "q" for value in fixed))
        self._arguments = ctypes.create_string_buffer(8 * (changing + len(fixed)))
        form.pack_into(self._arguments, 8 * changing, *fixed)
        # The kernels have one parameter, a structure of these.
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._arguments))
        self._cooperative = _Attribute(_LAUNCH_COOPERATIVE, 0, (ctypes.c_int * 16)(1))
        self._stream = None
        entered = enter_context(device_index)
        try:
            self._steps = [self._step(call) for call in self.calls]
        finally:
            if entered:
                leave_context()

    def _step(self, call: Call) -> tuple:
        key = (self._index, call.source, call.kernel, call.defines)
        with loading:
            function = _functions_of_chains.get(key)
            if function is None:
                function = load_function(
                    source_file(call.source), self._index, call.kernel, dict(call.defines), call.shared_bytes
                )
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
        entered = enter_context(self._index)
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
                    check_status(status, f"Launching {call.kernel} with {call.blocks} blocks of {call.threads} threads")
        finally:
            if entered:
                leave_context()


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream."""
    # What torch's own compiler calls; it skips the object that the public function builds.
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return fast(device_index) if fast else torch.cuda.current_stream(device_index).cuda_stream
