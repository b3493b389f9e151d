"""The part of a tensor that a rank holds, and where its elements stand in the whole: digests of all parts add up to that of
the whole.

Known are DTensors (FSDP2, tensor parallelism) and the flat parameters of FSDP1 with `use_orig_params=True`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.errors import InputError
from det_lightning.kernels.digest_place import Place


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor.

    tensor: its own elements. shape: of the whole. place: of the elements within the whole; None: all of it.
    sharded: other ranks hold other elements. counted: of several ranks that hold the same elements, this is the one whose
    elements enter the digest.
    """

    tensor: torch.Tensor
    shape: torch.Size
    place: Place | None = None
    sharded: bool = False
    counted: bool = True


@dataclass(frozen=True)
class FlatShard:
    """What this rank holds of a parameter of FSDP1: `count` elements in a row from number `first` of a tensor of `shape`."""

    shape: torch.Size
    first: int
    count: int
    counted: bool

    def piece(self, tensor: torch.Tensor) -> Piece | None:
        """`tensor`, laid out like the parameter; None if it is not, as a count of steps is not."""
        if tensor.dim() != 1 or tensor.numel() != self.count:
            return None
        place = Place(self.first, max(self.count, 1), max(self.count, 1))
        return Piece(tensor.detach(), self.shape, place, sharded=True, counted=self.counted)


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """What this rank holds of `tensor`, which may be a DTensor. Raises InputError for one with pending sums,
    and as `place_of_box`."""
    if type(tensor).__name__ != "DTensor":
        return Piece(tensor.detach(), tensor.shape)
    from torch.distributed.tensor import Replicate, Shard

    placements, mesh, shape = tensor.placements, tensor.device_mesh, tensor.shape
    coordinate = mesh.get_coordinate()
    copies = [dim for dim, placement in enumerate(placements) if isinstance(placement, Replicate)]
    cuts = [placement for placement in placements if not isinstance(placement, Replicate)]
    # Strided shards (FSDP on top of tensor parallelism) are cut evenly here or refused below.
    if any(not isinstance(cut, Shard) and "StridedShard" not in type(cut).__name__ for cut in cuts):
        raise InputError(f"{name} is a DTensor with placements {placements}: its value is not complete on any rank")
    local = tensor.to_local().detach()
    if coordinate is None:
        return Piece(local, shape, None, sharded=True, counted=False)
    sizes, offsets = _box(name, shape, mesh, placements)
    if tuple(local.shape) != tuple(sizes) and local.numel():
        raise InputError(
            f"{name}: this rank holds {list(local.shape)} of {list(shape)}, but {placements} say {list(sizes)}"
        )
    counted = all(coordinate[dim] == 0 for dim in copies)
    return Piece(local, shape, place_of_box(name, shape, sizes, offsets), sharded=bool(cuts), counted=counted)


def _box(name: str, shape: torch.Size, mesh: Any, placements: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes and offsets of this rank's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for dim in {cut.dim for cut in placements if "StridedShard" in type(cut).__name__}:
        parts = prod(mesh.size(i) for i, cut in enumerate(placements) if getattr(cut, "dim", None) == dim)
        if shape[dim] % parts:
            raise InputError(
                f"{name} {list(shape)} is cut into {parts} uneven parts in dimension {dim} by two kinds of sharding; "
                f"make that size a multiple of {parts}, or record with kinds that leave it out"
            )
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def place_of_box(name: str, shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> Place | None:
    """Where the elements of a part of `sizes` at `offsets` stand in a tensor of `shape`; None if it is all or nothing.

    Raises InputError if they are no runs at equal distances: a part cut in two dimensions behind its first, or in three.
    """
    if 0 in sizes or tuple(shape) == tuple(sizes):
        return None
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last_cut = max(dim for dim in range(len(shape)) if sizes[dim] != shape[dim])
    run = sizes[last_cut] * strides[last_cut]
    outer = [dim for dim in range(last_cut) if sizes[dim] > 1]
    if any(strides[one] != sizes[other] * strides[other] for one, other in pairwise(outer)):
        raise InputError(
            f"{name} {list(shape)} is cut in several dimensions behind its first (a part has {list(sizes)}), so that its "
            f"elements do not lie at equal distances, which digests need; record with kinds that leave it out"
        )
    return Place(first, run, strides[outer[-1]] if outer else run)


def flat_shards(model: torch.nn.Module) -> dict[int, FlatShard]:
    """id of a parameter -> what this rank holds of it, for the parameters that FSDP1 flattened; empty without FSDP1.

    Raises InputError for `use_orig_params=False`, which leaves no parameter a name.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")  # loaded where it is in use
    if fsdp is None:
        return {}
    found: dict[int, FlatShard] = {}
    for module in fsdp.FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if flat._params is None:
            raise InputError(
                "FSDP was given use_orig_params=False, so single parameters have no names to record; leave it at True"
            )
        counted = 0 in dist.get_process_group_ranks(handle.process_group)
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            first, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
            found[id(parameter)] = FlatShard(torch.Size(shape), first, count, counted)
    return found
