"""The covered functions of parameters alone, each by its name; their backward passes are exact sums and roundings too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from det_lightning.layers.call_names import DIVISIONS, is_basic_index, true_division
from det_lightning.layers.parameter_moves import MOVES
from det_lightning.ops import activation, elementary, linear
from det_lightning.ops.broadcast import arithmetic
from det_lightning.ops.matmul import det_matmul
from det_lightning.ops.means import mean_over
from det_lightning.ops.reduction import det_sum

APART = frozenset("detach data requires_grad_".split())
ARITHMETIC = {
    **dict.fromkeys("add radd iadd".split(), "add"),
    **dict.fromkeys("sub isub subtract rsub".split(), "sub"),
    **dict.fromkeys("mul rmul imul multiply".split(), "mul"),
    **dict.fromkeys(DIVISIONS, "div"),
}
_ELEMENTARY = {
    name: getattr(elementary, f"det_{name}")
    for name in "exp expm1 log log1p sqrt rsqrt reciprocal sigmoid tanh softplus silu gelu".split()
}
_STOCK = frozenset("neg abs rdiv clamp clip clamp_min clamp_max".split())
_PRODUCTS = frozenset("matmul mm bmm mv dot".split())
# What moves bits or rounds once is the same with a gradient and without.
STOCK_ON_CONSTANTS = MOVES | APART | ARITHMETIC.keys() | _STOCK


def function_of(name: str, func: Callable, args: tuple, kwargs: dict, *, moved: bool) -> Callable | None:
    """What computes a call on batch-free tensors under the contract, from the same arguments; None without a contract.

    Args:
        moved: the operands are parameters, or made of them by moves alone.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if name in ARITHMETIC:
        return _arithmetic(name, func, args, kwargs, tensors)
    if name in MOVES:
        by_index = name == "index_select" or (name == "getitem" and not is_basic_index(args[1]))
        return func if moved or not by_index else None
    if name in _STOCK and len(tensors) == 1:
        return _number_over if name == "rdiv" else func
    if len(args) == 1 and not kwargs and name in _ELEMENTARY:
        return _ELEMENTARY[name]
    if name == "relu" and len(args) == 1 and not any(kwargs.values()):
        return lambda x, **_: activation.relu(x)
    if name == "square" or (name == "pow" and len(args) == 2 and args[1] in (2, 2.0)):
        return lambda x, *_: x * x
    if name in ("sum", "mean") and args and not {*kwargs} - {"dim", "keepdim"}:
        return det_sum if name == "sum" else _mean
    if name in _PRODUCTS and len(tensors) == 2 and not kwargs:
        return lambda a, b: det_matmul(a, b, dtype=a.dtype)
    if name == "linear":
        return linear.linear
    return None


def _arithmetic(name: str, func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Callable | None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
        return None
    if len(tensors) < 2:
        number = len(args) == 2 and isinstance(args[1], (int, float))
        return true_division(func) if name in DIVISIONS and number and args[0].is_cuda else func
    if in_place(func):
        return func if tensors[0].shape == tensors[1].shape else None
    operation = ARITHMETIC[name]
    if name == "rsub":
        return lambda a, b: arithmetic("sub", b, a)
    return lambda a, b, **_: arithmetic(operation, a, b)


def in_place(func: Callable) -> bool:
    """add_ and __iadd__ change their first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _number_over(x: Tensor, number: Any) -> Tensor:
    """number / x."""
    return arithmetic("div", torch.tensor(number, dtype=x.dtype, device=x.device), x)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return mean_over(x, dim, keepdim=keepdim)
