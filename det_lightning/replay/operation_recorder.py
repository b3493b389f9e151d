"""Records every operation of a step, with digests of what goes in and comes out, and moves no bit of it.

PyTorch's operations are seen below autograd, those of the backward pass included; det_lightning's own kernels are seen
where they are dispatched. What runs outside both (NumPy, a compiled graph) shows as a value that comes from nowhere.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from det_lightning.bisection.operation_log import PENDING, UNREAD, Operation, Value, write_line
from det_lightning.errors import DetError
from det_lightning.kernels import dispatch
from det_lightning.ledger.digest import tensor_digest

_ACCUMULATE = (1 << 64) - 1  # the sequence number of every node that stores a gradient
_SKIPPED = ("profiler",)
_UNINITIALISED = frozenset(
    f"aten::{name}" for name in "empty empty_like new_empty empty_strided new_empty_strided".split()
)
_OVERWRITTEN = frozenset(
    {"aten::copy_", "aten::fill_", "aten::zero_"}
)  # what their first argument held is read by nobody
_MEMORY = "aten::set_"  # gives a tensor memory that may not have been written yet, as a copy.deepcopy does first
_ASYNCHRONOUS = ("c10d.", "_c10d_functional.")
_DRIVER = "det_lightning.replay.run"  # whoever started the replay is no part of it
_OPTIMIZERS = ("torch.optim.", "det_lightning.optim.")
_UNSEEN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "det_lightning")


class OperationRecorder(TorchDispatchMode):
    """Writes the operations that run while it is on to `path`; use `recording()`.

    Args:
        root: for the paths of modules.
        capture: indices of operations whose tensors are kept, in `captured`: index -> {"inputs", "outputs"}, both
            lists of CPU tensors, inputs as they were before.

    Attributes:
        phase, micro_batch: what the operations are filed under from now on.
    """

    def __init__(self, path: Path, root: torch.nn.Module, capture: Iterable[int] = ()):
        super().__init__()
        self.phase, self.micro_batch = "begin", 0
        # (data pointer, shape) -> name and tensor, which is kept: its memory must not become that of another one.
        self._names: dict[tuple[int, tuple[int, ...]], tuple[str, torch.Tensor]] = {}
        self.captured: dict[int, dict[str, list[torch.Tensor]]] = {}
        self._path, self._root, self._capture = path, root, set(capture)
        self._index = 0
        self._file: TextIO | None = None
        self._quiet = False
        self._stack: list[str] = [""]
        self._paths = {id(module): name for name, module in root.named_modules()}
        # autograd's sequence numbers in rising order, and the module that runs from each on
        self._entered_at: list[int] = []
        self._entered: list[str] = []
        self._forward_of: dict[int, tuple[int, str]] = {}  # sequence number -> (index, place) of the first operation

    @contextmanager
    def recording(self) -> Iterator["OperationRecorder"]:
        """On within the block; everything is as before afterwards, after an exception too."""
        if dispatch.observer is not None:
            raise DetError("the operations of a step are being recorded already; one recorder at a time")
        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter),
            torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with open(self._path, "w", encoding="utf-8") as self._file, self:
                dispatch.observer = self._kernel
                self._now_in("")
                yield self
        finally:
            dispatch.observer = None
            self._file = None
            for hook in hooks:
                hook.remove()

    def name(self, named: Mapping[str, torch.Tensor]) -> None:
        """Operations on these tensors show their names from now on."""
        self._names |= {(each.data_ptr(), tuple(each.shape)): (name, each) for name, each in named.items()}

    def note(self, name: str, tensors: dict[str, torch.Tensor], *, samples: tuple[int, ...] | None = None) -> None:
        """An entry that computes nothing: named tensors as they are now."""
        if self._file is None:
            return
        with self.silent():
            values = tuple(self._value(tensor, label) for label, tensor in tensors.items())
            index = self._next()
            if index in self._capture:
                self._keep(index, [], list(tensors.values()))
            self._write(Operation(index, self.phase, self.micro_batch, "", name, "", None, "", (), (), values, samples))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._quiet or self._file is None or func.namespace in _SKIPPED:
            return func(*args, **kwargs)
        if func._schema.name in _UNINITIALISED:
            # What lies there is no value of the run, but it would be digested: make it the same in every pass.
            return func(*args, **kwargs).zero_()
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ] + [
            kwargs[argument.name]
            for argument in func._schema.arguments
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write
        ]
        name = str(func).removesuffix(".default")
        unread = (
            "first input" if func._schema.name in _OVERWRITTEN else "outputs" if func._schema.name == _MEMORY else ""
        )
        return self._observe(name, lambda: func(*args, **kwargs), args, kwargs, list(tensors_in(written)), unread)

    def _kernel(self, name: str, function: Callable, arguments: tuple, options: dict) -> Any:
        """A kernel of our own; which of its arguments it writes to is seen from their digests."""
        if self._quiet or self._file is None:
            return function(*arguments, **options)
        return self._observe(f"det.{name}", lambda: function(*arguments, **options), arguments, options, None)

    def _observe(self, name, call, args, kwargs, written, unread: str = "") -> Any:
        """unread: which values are none of the run: "outputs", "first input", or nothing."""
        with self.silent():
            given = list(tensors_in((args, kwargs)))
            inputs = tuple(self._value(tensor) for tensor in given)
            if unread == "first input":
                inputs = (replace(inputs[0], digest=UNREAD), *inputs[1:])
            index = self._next()
            kept = [_copy(tensor) for tensor in given] if index in self._capture else []
            node = torch._C._current_autograd_node()
            module, node_name, forward, place = self._origin(node)
            if node is None:
                self._forward_of.setdefault(torch.autograd._get_sequence_nr() - 1, (index, place))
        before, self._quiet = self._quiet, True  # an operation is one entry, whatever it is made of
        try:
            result = call()
        finally:
            self._quiet = before
        with self.silent():
            made = list(tensors_in(result))
            if any(tensor.is_cuda for tensor in (*given, *made)):
                torch.cuda.synchronize()  # copies to the host, and work of other streams, may still be under way
            if written is None:
                written = [
                    tensor
                    for tensor, before in zip(given, inputs, strict=True)
                    if tensor.numel() and self._value(tensor).digest != before.digest
                ]
            made += [each for each in written if not any(each is other for other in made)]
            outputs = tuple(self._value(tensor) for tensor in made)
            if name.startswith(_ASYNCHRONOUS):  # may still be under way
                outputs = tuple(replace(each, digest=PENDING) for each in outputs)
            elif unread == "outputs":
                outputs = tuple(replace(each, digest=UNREAD) for each in outputs)
            if index in self._capture:
                self._keep(index, kept, made)
            spelled = [spell(each) for each in args] + [f"{key}={spell(each)}" for key, each in kwargs.items()]
            if not made and result is not None:
                spelled.append(f"gives {spell(result)}")
            self._write(
                Operation(
                    index, self.phase, self.micro_batch, module, name, node_name, forward, place, tuple(spelled),
                    inputs, outputs,
                )
            )  # fmt: skip
        return result

    def _origin(self, node: Any) -> tuple[str, str, int | None, str]:
        """(module, name of the autograd node, index of the forward operation, place) of what runs now."""
        if node is None:
            return self._stack[-1], "", None, self._place()
        number = node._sequence_nr()
        if number == _ACCUMULATE:
            return "", node.name().rpartition("::")[2], None, ""
        index, place = self._forward_of.get(number, (None, ""))
        found = bisect_right(self._entered_at, number)
        return self._entered[found - 1] if found else "", node.name(), index, place

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self._paths.get(id(module), self._stack[-1]))
        self._now_in(self._stack[-1])

    def _leave(self, *_: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._now_in(self._stack[-1])

    def _now_in(self, path: str) -> None:
        self._entered_at.append(torch.autograd._get_sequence_nr())
        self._entered.append(path)

    def _value(self, tensor: torch.Tensor, name: str = "") -> Value:
        try:
            digest = tensor_digest(_without_repeats(tensor)).hex()
            storage = tensor.untyped_storage().data_ptr()
            name = name or self._names.get((tensor.data_ptr(), tuple(tensor.shape)), ("", tensor))[0]
        except (RuntimeError, NotImplementedError, DetError):
            storage, digest = 0, UNREAD  # no plain memory behind it: a fake, sparse or wrapped tensor
        return Value(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest, storage, name)

    def _keep(self, index: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.captured[index] = {"inputs": inputs, "outputs": [_copy(tensor) for tensor in outputs]}

    def _next(self) -> int:
        self._index += 1
        return self._index - 1

    def _write(self, operation: Operation) -> None:
        self._file.write(write_line(operation))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within the block nothing is recorded."""
        before, self._quiet = self._quiet, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._quiet = before

    def _place(self) -> str:
        """File, line and function of the innermost code that is neither ours nor a library's; else of the optimizer."""
        frame, optimizer = sys._getframe(2), ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith(_DRIVER):
                break
            here = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            if module.startswith(_OPTIMIZERS):
                optimizer = optimizer or here
            elif module.partition(".")[0] not in _UNSEEN and not here.startswith(_STANDARD_LIBRARY):
                return here.removeprefix(f"{os.getcwd()}{os.sep}")
            frame = frame.f_back
        return optimizer


_STANDARD_LIBRARY = (os.path.dirname(os.__file__), "<frozen")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def spell(value: Any) -> str:
    """An argument in words: a tensor by its kind only, a float so that it reads back to the same bits."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spell(each) for each in value) + "]"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return str(value)
    return type(value).__name__


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one element along every expanded dimension, so that no digest reads more than memory holds."""
    tensor = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
