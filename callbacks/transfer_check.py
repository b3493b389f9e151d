"""Watches the digits that travel between ranks: what arrives has the checksum, modulo 2^64, of what was sent."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from det_lightning.distributed import transfer
from det_lightning.distributed.exchange import reduce_scatter


class WrongTransfer(NamedTuple):
    """Sums for the gradients of `label` that left rank `source` and arrived changed at rank `rank`; source None: what
    several ranks sent was added up on the way. persistent: wrong again when they were sent once more."""

    label: str
    source: int | None
    rank: int
    persistent: bool


@dataclass
class _Sent:
    """claimed: int64 [ranks], checksums of its share by those who sent; found: of what arrived, or of their sum [1]."""

    label: str
    sent: torch.Tensor
    group: Any
    summed: bool
    claimed: torch.Tensor
    found: torch.Tensor | None = None

    def wrong(self) -> list[int | None]:
        """Ranks whose share arrived as another."""
        if self.summed:
            return [None] if bool(self.claimed.sum() != self.found.sum()) else []
        sources = (self.claimed != self.found).nonzero().flatten().tolist()
        return [dist.get_global_rank(self.group or dist.group.WORLD, source) for source in sources]

    def send_again(self) -> None:
        """Observed like the first time."""
        ranks = dist.get_world_size(self.group)
        received = torch.empty_like(self.sent[: len(self.sent) // ranks] if self.summed else self.sent)
        send = reduce_scatter if self.summed else dist.all_to_all_single
        work = send(received, self.sent, group=self.group, async_op=True)
        transfer.watched(self.label, received, self.sent, self.group, work).wait()


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
        sums = sent.reshape(dist.get_world_size(group), -1).sum(dim=1, dtype=torch.int64)
        one = _Sent(label, sent, group, received.numel() < sent.numel(), torch.empty_like(sums))
        self._sent.append(one)
        return _Checked(one, received, work, dist.all_to_all_single(one.claimed, sums, group=group, async_op=True))

    def judge(self) -> WrongTransfer | None:
        """What went wrong since the last call, on any rank; the same answer on every rank. All transfers are made once more
        for the verdict, where one was wrong."""
        sent, self._sent = self._sent, []
        if not sent:
            return None
        self.checked += len(sent)
        wrong = [(place, source) for place, one in enumerate(sent) for source in one.wrong()]
        seen = torch.tensor([len(wrong)], device=sent[0].sent.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if not int(seen):
            return None
        for one in sent:
            one.send_again()
        again, self._sent = self._sent, []
        told = [(sent[place].label, source, dist.get_rank(), bool(again[place].wrong())) for place, source in wrong]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
        return WrongTransfer(*next(each for rank in everyone for each in rank))


class _Checked:
    """A work whose result is checksummed as soon as it is there; on CUDA in the order of the stream."""

    def __init__(self, one: _Sent, received: torch.Tensor, work: Any, claim: Any):
        self._one, self._received, self._work, self._claim = one, received, work, claim

    def wait(self) -> None:
        self._work.wait()
        self._claim.wait()
        shares = 1 if self._one.summed else dist.get_world_size(self._one.group)
        self._one.found = self._received.reshape(shares, -1).sum(dim=1, dtype=torch.int64)
