"""A watcher of transfers sees what was sent and what came, by both ways of sending."""

import torch
import torch.distributed as dist
from det_lightning.callbacks.transfer_check import TransferCheck

from det_lightning.distributed import transfer
from det_lightning.distributed.exchange import reduce_scatter
from tests.claims.processes import on_ranks


class _Flip:
    def __init__(self, work, received):
        self._work, self._received = work, received

    def wait(self):
        self._work.wait()
        self._received.view(-1)[3] ^= 1 << 9


def send(rank, world_size, port, summed, flips):
    """What is found of one transfer; `flips`: how many times rank 1 gets another word."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    check, left = TransferCheck(), [flips if rank == 1 else 0]

    def flip(label, received, sent, group, work):
        left[0] -= 1
        return _Flip(work, received) if left[0] >= 0 else work

    transfer.watchers.append(flip)
    check.start()
    sent = torch.arange(world_size * 10, dtype=torch.int32).view(world_size, 10) * (rank + 1)
    received = torch.empty_like(sent[:1] if summed else sent)
    work = (reduce_scatter if summed else dist.all_to_all_single)(received, sent, group=None, async_op=True)
    transfer.watched("first.weight", received, sent, None, work).wait()
    found = check.judge()
    check.stop()
    transfer.watchers.clear()
    dist.destroy_process_group()
    return found


def test_a_sound_transfer_is_not_accused():
    assert on_ranks(3, send, False, 0) == [None] * 3
    assert on_ranks(3, send, True, 0) == [None] * 3


def test_a_wrong_word_is_named_on_every_rank():
    assert on_ranks(3, send, False, 1) == [("first.weight", 0, 1, False)] * 3
    assert on_ranks(3, send, False, 2) == [("first.weight", 0, 1, True)] * 3


def test_a_wrong_word_of_a_sum_in_transit_is_named_without_a_sender():
    assert on_ranks(3, send, True, 1) == [("first.weight", None, 1, False)] * 3
    assert on_ranks(3, send, True, 5) == [("first.weight", None, 1, True)] * 3
