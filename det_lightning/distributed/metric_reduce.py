"""Reductions of logged values over ranks: exact sums, one rounding."""

import math
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import InputError
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.reduction import det_sum_partial

_DOING = "a value was reduced over the ranks"
_ADDED, _COMPARED, _BITWISE = ("mean", "avg", "sum"), ("max", "min", "product"), ("band", "bor", "bxor")
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)  # that backends compare; sums take all


def reduce_metric(tensor: torch.Tensor, group: Any, operation: Any) -> torch.Tensor:
    """Sum, mean, maximum or minimum over the ranks of a process group.

    Args:
        tensor: any shape; the same on every rank.
        group: a process group, or None for the default one.
        operation: "mean", "avg", "sum", "max", "min" or a torch.distributed.ReduceOp.

    Returns:
        For "sum" of integers the exact integer; for "mean" of integers float32 (not truncated); for floats the
        exact sum over ranks (divided by their number) rounded once.

    Raises:
        InputError: another operation, or a dtype or device that it is not defined for.
        LostRankError: as for `other_ranks`.
    """
    name = operation.lower() if isinstance(operation, str) else str(operation or "sum").rpartition(".")[2].lower()
    if not dist.is_initialized():
        return tensor
    group = group if group is not None else dist.group.WORLD
    _check(name, operation, tensor, group)
    world_size = dist.get_world_size(group)
    if name not in _ADDED:
        result = tensor.clone()
        with other_ranks(_DOING):
            dist.all_reduce(result, op=getattr(dist.ReduceOp, name.upper()), group=group)
        return result
    divisor = world_size if name in ("mean", "avg") else 1
    if not tensor.is_floating_point():
        total = tensor.to(torch.int64, copy=True)
        with other_ranks(_DOING):
            dist.all_reduce(total, group=group)
        return (total.to(torch.float64) / world_size).to(torch.float32) if divisor > 1 else total.to(tensor.dtype)
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    mine = tensor.detach().contiguous()
    with other_ranks(_DOING):
        dist.all_gather(parts, mine, group=group)
    stacked = torch.stack(parts)
    if tensor.dtype == torch.float64:
        columns = stacked.reshape(world_size, -1).t().tolist()
        means = [_exact_mean(column, divisor) for column in columns]
        return torch.tensor(means, dtype=torch.float64).reshape(tensor.shape)
    return det_finalize(det_sum_partial(stacked, dim=0), dtype=tensor.dtype, denominator=divisor)


def _check(name: str, operation: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Whatever torch would refuse, which is no sign of a lost rank."""
    dtype = tensor.dtype
    if name not in (*_ADDED, *_COMPARED, *_BITWISE):
        allowed = ", ".join((*_ADDED, *_COMPARED, *_BITWISE))
        raise InputError(f"reduce_op={operation!r} is no reduction over ranks; allowed are {allowed}.")
    allowed = _INTEGERS if name in _BITWISE else (*_FLOATS, *_INTEGERS)
    summed = name in _ADDED and not (dtype.is_floating_point or dtype.is_complex)
    if dtype not in allowed and not summed:
        listed = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        raise InputError(f"{name} over ranks takes {listed}; got {dtype}. Convert it first, with .to(...).")
    if dist.get_backend(group) == "nccl" and not tensor.is_cuda:
        raise InputError(f"NCCL reduces tensors on GPUs; got one on {tensor.device}. Move it first, with .to(...).")


def _exact_mean(values: list[float], divisor: int) -> float:
    """The sum of the float64 values over divisor, rounded once; NaN and infinities as IEEE has them."""
    if not all(map(math.isfinite, values)):
        return sum(values)
    mean = sum(map(Fraction, values)) / divisor
    try:
        return float(mean)
    except OverflowError:
        return math.copysign(math.inf, mean)
