"""Tensors that depend on parameters alone: penalties on weights. They are the same in every micro-batch and on every rank,
so their gradient belongs to the step once and needs no sum over samples.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from det_lightning.layers.call_names import DIVISIONS
from det_lightning.ops.loss import exact_mean
from det_lightning.ops.reduction import det_sum

# Elementwise operations of one rounding, and moves; their backward passes are such operations too.
_ARITHMETIC = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div truediv itruediv true_divide".split()
)
_COVERED = _ARITHMETIC | frozenset(
    """view reshape flatten unflatten permute transpose t swapaxes movedim squeeze unsqueeze contiguous clone to float
    narrow select split chunk unbind cat concat stack T mT positive ravel getitem neg abs""".split()
)
_APART = frozenset("detach data requires_grad_".split())


class BatchFree:
    """Knows the tensors of one micro-batch that are functions of the model's parameters and buffers alone."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._nodes: set[Any] = set()  # autograd nodes
        self._buffers: set[int] | None = None

    def __call__(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which requires a gradient, is one."""
        if tensor.grad_fn is None:
            return tensor.requires_grad and isinstance(tensor, nn.Parameter)
        return tensor.grad_fn in self._nodes

    def among(self, operands: Iterable[Tensor]) -> list[Tensor]:
        """Those that require a gradient and are batch-free."""
        return [value for value in operands if value.requires_grad and self(value)]

    def are_all(self, operands: list[Tensor]) -> bool:
        """Whether a call on these operands is a function of parameters and buffers alone, with a gradient."""
        if not any(value.requires_grad and self(value) for value in operands):
            return False
        return all(self(value) if value.requires_grad else self.is_buffer(value) for value in operands)

    def call(self, name: str, func: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """(whether the call is covered, its result)."""
        if name in _APART:
            return True, func(*args, **kwargs)
        operand = args[0] if args else kwargs.get("input")
        if name == "square" or (name == "pow" and len(args) == 2 and args[1] in (2, 2.0)):
            result = operand * operand
        elif name in ("sum", "mean") and len(args) == 1 and not kwargs and operand.dtype is torch.float32:
            result = det_sum(operand) if name == "sum" else exact_mean(operand)
        else:
            if name in DIVISIONS and len(args) == 2 and isinstance(args[1], (int, float)) and args[0].is_cuda:
                # CUDA multiplies by the reciprocal of a number; it divides by a tensor.
                args = (args[0], torch.tensor(args[1], dtype=args[0].dtype, device=args[0].device))
            result = func(*args, **kwargs)
            made = result if isinstance(result, (tuple, list)) else (result,)
            if not any(isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad for v in made):
                return True, result
            if name not in _COVERED or kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
                return False, None
            shapes = {value.shape for value in args if isinstance(value, Tensor) and value.requires_grad}
            if name in _ARITHMETIC and shapes - {result.shape}:  # the gradient of a broadcast is a sum
                return False, None
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._nodes.add(value.grad_fn)
        return True, result

    def parameter_below(self, tensor: Tensor) -> Tensor | None:
        """A parameter that a batch-free tensor is made of."""
        if tensor.grad_fn is None:
            return tensor
        waiting = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if hasattr(node, "variable"):
                return node.variable
            waiting.extend(below for below, _ in node.next_functions if below is not None)
        return None

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether it is one of the model's buffers."""
        if self._buffers is None:
            self._buffers = {id(buffer) for buffer in self._model.buffers()}
        return id(tensor) in self._buffers
