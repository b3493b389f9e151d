"""Finds replicas that drift apart: every rank digests its copy, and the digests must be the same on all."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from det_lightning.ledger.record import root


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


def drift_of(digests: Mapping[str, bytes], group: Any = None) -> Drift | None:
    """Compares this rank's digests with those of all ranks of a process group; the same answer on every rank.

    Without a process group there is nothing to compare, and None is returned, as when all agree. Collective: every rank
    has to call it.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
        return None
    size = dist.get_world_size(group)
    roots: list[Any] = [None] * size
    dist.all_gather_object(roots, root(digests), group=group)
    if len(set(roots)) == 1:
        return None
    copies: list[Any] = [None] * size
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
