"""Exact sums over ranks. Integers are added, in any order and grouping; nothing is rounded here."""

import torch
import torch.distributed as dist

from ..errors import InputError


def det_all_reduce(acc: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Exact sum of long-accumulator digits over the ranks of a process group.

    Args:
        acc: [..., NB] int64 digits (`det_gemm_partial`, `det_sum_partial`); the same shape on every rank.
        group: a process group; the default group if None. Without an initialised default group there is
            one rank and the digits come back as they are.

    Returns:
        [..., NB] int64, a new tensor on every rank; the same integers whatever the world size.

    Raises:
        InputError: acc is not an int64 tensor.
    """
    if not isinstance(acc, torch.Tensor) or acc.dtype != torch.int64:
        given = acc.dtype if isinstance(acc, torch.Tensor) else type(acc).__name__
        raise InputError(f"det_all_reduce adds int64 digits; got {given}. Pass the result of det_gemm_partial.")
    total = acc.clone()
    add_over_ranks(total, group)
    return total


def add_over_ranks(integers: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Adds int64 integers over the ranks in place (modulo 2^64)."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(integers, op=dist.ReduceOp.SUM, group=group)
