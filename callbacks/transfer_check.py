"""Watches the digits that travel between ranks: what arrives has the checksum, modulo 2^64, of what was sent."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from det_lightning.distributed import transfer


class WrongTransfer(NamedTuple):
    """Sums for the gradients of `label` that left rank `source` and arrived as others at rank `rank`. persistent: wrong
    again when they were sent once more."""

    label: str
    source: int
    rank: int
    persistent: bool


@dataclass
class _Sent:
    label: str
    sent: torch.Tensor
    group: Any
    received: torch.Tensor
    claimed: torch.Tensor  # int64 [ranks], checksums by those who sent
    found: torch.Tensor | None = None  # and of what arrived

    def wrong(self) -> list[int]:
        """Ranks of the group whose share arrived as another."""
        return (self.claimed != self.found).nonzero().flatten().tolist()


class TransferCheck:
    """A watcher of `distributed.transfer` between `start` and `stop`; `judge` is collective."""

    def __init__(self):
        self._sent: list[_Sent] = []
        self.checked = 0

    def start(self) -> None:
        if self not in transfer.watchers:
            transfer.watchers.append(self)

    def stop(self) -> None:
        """No more checks; a second call does nothing."""
        if self in transfer.watchers:
            transfer.watchers.remove(self)
        self._sent = []

    def __call__(self, label: str, received: torch.Tensor, sent: torch.Tensor, group: Any, work: Any) -> "_Checked":
        one = _Sent(label, sent, group, received, torch.empty(dist.get_world_size(group), dtype=torch.int64))
        sums = _checksums(sent, group)
        one.claimed = torch.empty_like(sums)
        self._sent.append(one)
        return _Checked(one, work, dist.all_to_all_single(one.claimed, sums, group=group, async_op=True))

    def judge(self) -> WrongTransfer | None:
        """What went wrong since the last call, on any rank; the same answer on every rank. Wrong transfers are made once
        more for the verdict."""
        sent, self._sent = self._sent, []
        if not sent:
            return None
        self.checked += len(sent)
        wrong = [(place, source) for place, one in enumerate(sent) for source in one.wrong()]
        seen = torch.tensor([len(wrong)], device=sent[0].sent.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if not int(seen):
            return None
        again: list[list[int]] = []
        for one in sent:
            transfer.all_to_all(torch.empty_like(one.sent), one.sent, one.group, one.label).wait()
            again.append(self._sent[-1].wrong())
        self._sent = []
        told = [
            (
                sent[place].label,
                dist.get_global_rank(sent[place].group or dist.group.WORLD, source),
                dist.get_rank(),
                bool(again[place]),
            )
            for place, source in wrong
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
        return WrongTransfer(*next(each for rank in everyone for each in rank))


class _Checked:
    """A work whose result is checksummed as soon as it is there; on CUDA in the order of the stream."""

    def __init__(self, one: _Sent, work: Any, claim: Any):
        self._one, self._work, self._claim = one, work, claim

    def wait(self) -> None:
        self._work.wait()
        self._claim.wait()
        self._one.found = _checksums(self._one.received, self._one.group)
        self._one.received = torch.empty(0)


def _checksums(words: torch.Tensor, group: Any) -> torch.Tensor:
    """Of each rank's share, int64 [ranks], modulo 2^64."""
    return words.reshape(dist.get_world_size(group), -1).sum(dim=1, dtype=torch.int64)
