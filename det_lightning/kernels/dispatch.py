"""Which backend computes: the device and dtype of the tensors decide, and anything else is refused with a reason.

A backend is imported at its first product, so that importing the package compiles and loads nothing.
"""

from types import ModuleType

import torch

from ..errors import InputError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(operation: str, name: str, value: object, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> None:
    """Raise InputError unless `value` is a dense CPU tensor of one of `dtypes`."""
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
    if not value.is_cpu:
        raise InputError(
            f"{operation}: {name} is on device {value.device}; there are kernels for cpu; move it with {name}.cpu()"
        )
    if value.layout is not torch.strided:
        raise InputError(
            f"{operation}: {name} has layout {value.layout}; only strided tensors are allowed; use {name}.to_dense()"
        )


_cpu: dict[str, ModuleType] = {}


def cpu_kernels(family: str) -> ModuleType:
    """The module `kernels.cpu.<family>`, loaded at the first call."""
    module = _cpu.get(family)
    if module is None:
        from importlib import import_module

        module = _cpu[family] = import_module(f".cpu.{family}", __package__)
    return module


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The two digest lanes of `tensor` (`arithmetic.tensor_digest`): any dtype, any strides, row-major order.

    Raises InputError for something that is no dense CPU tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"tensor_lanes: the argument is a {type(tensor).__name__}; pass a torch.Tensor")
    check_device("tensor_lanes", "tensor", tensor)
    return cpu_kernels("digest").tensor_lanes(tensor)
