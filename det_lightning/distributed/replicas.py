"""Whether all ranks hold the same tensors: every rank digests its copy, and the digests must be the same on all.

With exact arithmetic replicas cannot drift, so a difference means a fault: a flipped bit, a rank's own random state, a
tensor that somebody changed on one rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import DetError
from det_lightning.kernels.dispatch import many_lanes, unrecorded


@dataclass(frozen=True)
class Drift:
    """Ranks whose tensors are not those of the others.

    Attributes:
        ranks: rank -> names of its tensors that differ from the agreed ones.
        certain: more than half of the ranks agree on every tensor; otherwise the ranks are compared with rank 0, and
            which of them is wrong is not known.
    """

    ranks: dict[int, tuple[str, ...]]
    certain: bool

    @property
    def words(self) -> str:
        told = "; ".join(
            f"rank {rank}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for rank, names in sorted(self.ranks.items())
        )
        return told if self.certain else f"{told} (compared with rank 0; which side is wrong cannot be told)"


def drift_of(digests: Mapping[str, bytes], group: dist.ProcessGroup | None = None) -> Drift | None:
    """Compares this rank's digests with those of all ranks of a process group; the same answer on every rank.

    Without a process group there is nothing to compare, and None is returned, as when all agree. Collective: every rank
    has to call it.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
        return None
    hasher = blake2b(digest_size=8)
    for name, digest in sorted(digests.items()):
        hasher.update(repr((name, digest)).encode())
    with other_ranks("weights were compared over the ranks"), unrecorded():
        if len(set(_gathered(int.from_bytes(hasher.digest(), signed=True), group))) == 1:
            return None
        copies: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(copies, dict(digests), group=group)
    return compare_copies(copies)


def compare_copies(copies: list[Mapping[str, bytes]]) -> Drift | None:
    """Which of the ranks' copies differ, by majority for each tensor."""
    ranks: dict[int, list[str]] = {}
    certain = True
    for name in sorted({name for copy in copies for name in copy}):
        values = [copy.get(name) for copy in copies]
        (agreed, count), *_ = Counter(values).most_common()
        if 2 * count <= len(values):
            certain, agreed = False, values[0]
        for rank, value in enumerate(values):
            if value != agreed:
                ranks.setdefault(rank, []).append(name)
    return Drift({rank: tuple(names) for rank, names in ranks.items()}, certain) if ranks else None


def check_replicas(
    named: Sequence[tuple[str, torch.Tensor]], when: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raises DetError with ranks and tensor where a tensor is not the same bytes on all ranks of a process group.

    Args:
        named: (name, tensor), the same names on every rank.
        when: for the message.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    drift = drift_of(lanes_of(named), group)
    if drift is None:
        return
    differing = {name for names in drift.ranks.values() for name in names}
    name, tensor = next(each for each in named if each[0] in differing)
    unlike = [rank for rank, names in sorted(drift.ranks.items()) if name in names]
    who = f"rank {unlike[0]} differs" if len(unlike) == 1 and drift.certain else f"ranks {[0, *unlike]} differ"
    raise DetError(
        f"{who} from the others in {name} {list(tensor.shape)} {when}. Under exact arithmetic replicas cannot "
        f"drift: a bit was flipped, or code changed this tensor on some ranks only. Resume from the last checkpoint."
    )


def lanes_of(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """name -> the lanes of its tensor's digest; one launch and one look at each device."""
    devices: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    with unrecorded():
        for name, tensor in named:
            devices.setdefault(tensor.device, []).append((name, tensor.detach()))
        return {
            name: lanes.tobytes()
            for each in devices.values()
            for (name, _), lanes in zip(each, many_lanes([tensor for _, tensor in each]).cpu().numpy(), strict=True)
        }


def _gathered(number: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's 64-bit integer."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, mine, group=group)
    return [each.item() for each in numbers]
