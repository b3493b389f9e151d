"""What the ranks of a sharded training hold together: names that all agree on, and one sum of digests over the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from det_lightning.callbacks.pieces import FlatShard, Piece, flat_shards, piece_of

from det_lightning.errors import InputError

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARAMETERS_OF = {
    "weights": lambda name: name,
    "gradients": lambda name: name,
    "optimizer": lambda n: n.rpartition(".")[0],
}


def logical_name(name: str) -> str:
    """The name of a parameter or module without what FSDP1 and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Slot:
    """One tensor in the order that all ranks keep. given: this rank's elements enter the sum."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    device_type: str
    given: bool


@dataclass
class Shards:
    """The sharded tensors of one model. Every rank makes one, and every call of `slots` and `add` is collective.

    flat: name -> what this rank holds of a parameter that FSDP1 flattened.
    """

    flat: dict[str, FlatShard]
    _slots: dict[tuple[int, ...], list[Slot]] = field(default_factory=dict)
    _cpu_group: Any = None

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Shards | None":
        """None if every rank holds all of `model`. Collective if not. Raises InputError for shards of a kind that is not
        known: parameters that DeepSpeed partitioned, or `use_orig_params=False`."""
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_id"):
                raise InputError(
                    f"DeepSpeed has partitioned {name} (ZeRO stage 3), and no rank knows which part it holds; train with "
                    f"strategy='fsdp' or a lower stage, or leave the ledger out"
                )
        found = flat_shards(model)
        flat = {logical_name(name): found[id(each)] for name, each in model.named_parameters() if id(each) in found}
        if not flat and not any(type(each).__name__ == "DTensor" for each in model.parameters()):
            return None
        shards = cls(flat)
        if dist.get_backend() != "gloo":
            shards._cpu_group = dist.new_group(backend="gloo")
        return shards

    def shape(self, name: str, parameter: torch.Tensor) -> torch.Size:
        """Of the whole parameter."""
        return self.flat[name].shape if name in self.flat else parameter.shape

    def pieces(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
        """What this rank holds of each of the named tensors of a kind."""
        owner = _PARAMETERS_OF.get(kind, lambda name: None)
        found = {}
        for name, tensor in tensors.items():
            flat = self.flat.get(owner(name))
            found[name] = (flat and flat.piece(tensor)) or piece_of(name, tensor)
        return found

    def slots(self, pieces: Mapping[str, Piece]) -> list[Slot]:
        """The union of the ranks' tensors, in one order. Raises InputError on every rank if parts overlap or are missing."""
        told = [
            (name, str(each.tensor.dtype), tuple(each.shape), each.tensor.device.type, each.sharded, _counted(each))
            for name, each in sorted(pieces.items())
        ]
        mine = torch.tensor([int.from_bytes(blake3(repr(told).encode()).digest()[:8], "little", signed=True)])
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine, group=self._cpu_group)
        key = tuple(each.item() for each in ranks)
        if key not in self._slots:
            everyone: list[Any] = [None] * len(ranks)
            dist.all_gather_object(everyone, told, group=self._cpu_group)
            self._slots[key] = _union(everyone)
        return self._slots[key]

    def add(self, lanes: torch.Tensor) -> None:
        """lanes += those of the other ranks, modulo 2^64."""
        dist.all_reduce(lanes, group=None if lanes.is_cuda else self._cpu_group)


def _counted(piece: Piece) -> int:
    return piece.tensor.numel() if piece.counted else 0


def _union(everyone: list[list[tuple]]) -> list[Slot]:
    holders: dict[str, list[tuple[int, tuple]]] = {}
    for rank, told in enumerate(everyone):
        for name, *rest in told:
            holders.setdefault(name, []).append((rank, tuple(rest)))
    slots = []
    for name, held in sorted(holders.items()):
        dtype, shape, device_type, *_ = held[0][1]
        if len({rest[:3] for _, rest in held}) > 1:
            raise InputError(f"{name} is not the same kind of tensor on all ranks: {[rest[:3] for _, rest in held]}")
        sharded = any(rest[3] for _, rest in held)
        if sharded and sum(rest[4] for _, rest in held) != prod(shape):
            raise InputError(
                f"the ranks' parts of {name} {list(shape)} have {sum(rest[4] for _, rest in held)} elements together, "
                f"instead of {prod(shape)}: it is sharded in a way that is not known here"
            )
        giver = None if sharded else held[0][0]
        given = any(rank == dist.get_rank() and (sharded or rank == giver) for rank, _ in held)
        slots.append(Slot(name, getattr(torch, dtype.removeprefix("torch.")), torch.Size(shape), device_type, given))
    return slots
