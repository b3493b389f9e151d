"""Tensors that run under the contract wherever they go: Fabric leaves the loop to the user, so what happens between a batch
and its loss is seen through the batch's tensors and what is computed from them.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_leaves, tree_map

from det_lightning.errors import UncoveredError
from det_lightning.layers.checkpointing import covered_checkpointing
from det_lightning.layers.code_in_sight import code_in_sight
from det_lightning.layers.function_mode import FunctionMode
from det_lightning.strategies.start import refuse_compiled

_FABRICS_OWN_HOOK = "_backward_hook"  # on outputs of the model: it only looks whether fabric.backward was called


class Scope:
    """One micro-batch, from the moment it was loaded until fabric.backward has taken its loss.

    Attributes:
        mode: its function mode; None when it is over, and its tensors are ordinary ones again.
    """

    def __init__(self, mode: FunctionMode):
        self.mode: FunctionMode | None = mode

    def cover(self, values: Any) -> Any:
        """The same nest of values, its tensors covered."""
        return tree_map(lambda value: CoveredTensor.of(value, self) if isinstance(value, Tensor) else value, values)

    def end(self) -> None:
        self.mode = None


class CoveredTensor(Tensor):
    """A tensor of a micro-batch: torch functions of it run under the function mode of its scope."""

    inner: Tensor
    scope: Scope

    @classmethod
    def of(cls, value: Tensor, scope: Scope) -> "CoveredTensor":
        value = value.inner if isinstance(value, CoveredTensor) else value
        covered = value.as_subclass(cls)
        covered.inner, covered.scope = value, scope
        return covered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        scope = scope_of((args, kwargs))
        args, kwargs = uncovered(args), uncovered(kwargs)
        hook = getattr(args[1], "func", None) if len(args) > 1 else None
        if scope is None or getattr(hook, "__name__", "") == _FABRICS_OWN_HOOK:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            raise UncoveredError("backward was called on a tensor. Write fabric.backward(loss).")
        with scope.mode:
            return scope.cover(func(*args, **kwargs))


def uncovered(values: Any) -> Any:
    """The same nest of values, its tensors ordinary ones."""
    return tree_map(lambda value: value.inner if isinstance(value, CoveredTensor) else value, values)


def scope_of(values: Any) -> Scope | None:
    """The scope of a nest of values that is not over yet, or None."""
    for value in tree_leaves(values):
        if isinstance(value, CoveredTensor) and value.scope.mode is not None:
            return value.scope
    return None


class CoveredModule(nn.Module):
    """A model whose forward runs under the function mode of the batch that is handed in; on anything else, the covered
    calls are exact and others run as they are, and no gradient is collected.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self._looked = False

    @torch.compiler.disable  # Fabric compiles again, around this module, what it was handed compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._looked:
            self._looked = True
            _check_callers()
        scope = scope_of((args, kwargs))
        args, kwargs = uncovered(args), uncovered(kwargs)
        if scope is None:
            with FunctionMode(self.module, sink=None, samples=1, strict=False):
                return self.module(*args, **kwargs)
        with code_in_sight(), covered_checkpointing(scope.mode.again), scope.mode:
            output = self.module(*args, **kwargs)
        return scope.cover(output) if torch.is_grad_enabled() else output


def _check_callers() -> None:
    """Raises UncoveredError if a compiled module is calling."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), OptimizedModule):
            raise refuse_compiled("the model that was handed to fabric.setup")
        frame = frame.f_back
