"""Which backend computes: the device and dtype of the tensors decide, and anything else is refused with a reason.

A backend is imported at its first product, so that importing the package compiles and loads nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import InputError
from .digest_place import Place

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Called instead of a kernel as observer(name, kernel, arguments, options), and answers what the kernel answers: set
# only while the operations of a step are recorded.
observer: Callable[[str, Callable, tuple, dict], object] | None = None


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within, nothing is an operation of the step that is being recorded, nor a call that the contract has to cover: digests
    look at a run and are no part of it."""
    global observer
    before = observer
    if before is None:
        with torch._C.DisableTorchFunction():
            yield
        return
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        observer = None
        try:
            yield
        finally:
            observer = before


def check_tensor(operation: str, name: str, value: object, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> None:
    """Raise InputError unless `value` is a dense tensor of one of `dtypes` on a device that has kernels."""
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{operation}: {name} is a {type(value).__name__}, not a tensor; pass a torch.Tensor, "
            f"for example torch.tensor({name})"
        )
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(
            f"{operation}: {name} has dtype {str(value.dtype).removeprefix('torch.')}; allowed: {allowed}; "
            f"convert it with {name}.to(...) if the rounding is meant"
        )
    check_device(operation, name, value)


def check_device(operation: str, name: str, value: torch.Tensor) -> None:
    """Raise InputError unless there is a backend for the tensor's device and layout."""
    if not (value.is_cpu or value.is_cuda):
        raise InputError(
            f"{operation}: {name} is on device {value.device}; there are kernels for cpu and cuda; move it with "
            f"{name}.cpu() or {name}.cuda()"
        )
    if value.layout is not torch.strided:
        raise InputError(
            f"{operation}: {name} has layout {value.layout}; only strided tensors are allowed; use {name}.to_dense()"
        )
    if value.is_quantized or value.is_nested:  # strided by name, but what they hold is not in their elements alone
        what, use = ("quantized", "dequantize()") if value.is_quantized else ("nested", "unbind()")
        raise InputError(f"{operation}: {name} is a {what} tensor; only plain tensors are allowed; use {name}.{use}")


def _check_memory(operation: str, tensor: torch.Tensor) -> None:
    """Raise InputError for a tensor of which there is no memory to read, such as one that only stands for another."""
    if type(tensor).__name__ == "FakeTensor" or (tensor.numel() and not tensor.data_ptr()):
        raise InputError(
            f"{operation}: the tensor is a {type(tensor).__name__} without memory of its own, so it has no elements to "
            f"read; give the real tensor"
        )


class _Family:
    """The functions of one family of kernels; each call runs where its tensors are."""

    def __init__(self, family: str):
        self._family = family

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            function = getattr(_module(self._family, _device_type(self._family, name, arguments)), name)
            if observer is not None:
                return observer(f"{self._family}.{name}", function, arguments, options)
            return function(*arguments, **options)

        setattr(self, name, call)
        return call


def _device_type(family: str, name: str, arguments: tuple) -> str:
    """ "cpu" or "cuda"; raises InputError where tensors lie on several devices."""
    first = None
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if first is None:
                first = argument.device
            elif argument.device != first:
                devices = {other.device for other in arguments if isinstance(other, torch.Tensor)}
                listed = ", ".join(sorted(str(device) for device in devices))
                raise InputError(
                    f"{family}.{name}: the tensors are on several devices ({listed}); move them to one with .to(...)"
                )
    return "cpu" if first is None else first.type


@cache
def _module(family: str, device_type: str) -> ModuleType:
    """`kernels.cpu.<family>` or `kernels.cuda_<family>`."""
    if device_type == "cpu":
        return import_module(f".cpu.{family}", __package__)
    name = f"{__package__}.cuda_{family}"
    if find_spec(name) is None:
        raise InputError(f"there are no CUDA kernels for {family} in this version; move the tensors with .cpu()")
    return import_module(name)


@cache
def kernels_of(family: str) -> _Family:
    """The kernels of a family, such as "gemm", for the device of the tensors they are called with. A backend is loaded
    at its first call."""
    return _Family(family)


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The two digest lanes of `tensor` (`arithmetic.tensor_digest`): any dtype, any strides, row-major order.

    Raises InputError for something that is no dense tensor on a device with kernels.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"tensor_lanes: the argument is a {type(tensor).__name__}; pass a torch.Tensor")
    check_device("tensor_lanes", "tensor", tensor)
    _check_memory("tensor_lanes", tensor)
    with unrecorded():
        return kernels_of("digest").tensor_lanes(tensor)


def many_lanes(tensors: Sequence[torch.Tensor], places: Sequence[Place | None] | None = None) -> torch.Tensor:
    """The digest lanes of each of some tensors on one device as int64 [tensors, 2] there, without waiting for it.

    places: where the elements of each stand in a larger tensor (`digest_place`); None: the tensor is all of it. Parts of a
    tensor add up, modulo 2^64, to the lanes of the whole. Raises InputError as `tensor_lanes`.
    """
    if not tensors:
        return torch.zeros((0, 2), dtype=torch.int64)
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise InputError(
                f"many_lanes: tensors on {device} and {tensor.device}; digest those of each device in one call"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            check_device("many_lanes", "tensor", tensor)
        _check_memory("many_lanes", tensor)
    check_device("many_lanes", "tensor", tensors[0])
    with unrecorded():
        return kernels_of("digest_batch").many_lanes(tensors[0], tensors, places)
