"""A rank that is lost in a collective stops the others with a message that says when; a wrong argument is told apart."""

import time

import pytest
import torch
import torch.distributed as dist

from det_lightning.distributed.metric_reduce import reduce_metric
from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.distributed.waiting import tells_of_another_rank
from det_lightning.errors import LostRankError
from det_lightning.strategies.data import check_same
from det_lightning.strategies.start import broadcast_state
from tests.claims.processes import on_ranks

REDUCED = "a value was reduced over the ranks"
COLLECTIVES = {
    "broadcast": (lambda: broadcast_state(torch.nn.Linear(2, 3)), "rank 0's state was sent to every rank"),
    "order": (lambda: check_same(SampleOrder(8, 4)), "the order of samples was compared over the ranks"),
    "float": (lambda: reduce_metric(torch.ones(2), None, "mean"), REDUCED),
    "integer": (lambda: reduce_metric(torch.ones(2, dtype=torch.int64), None, "sum"), REDUCED),
    "largest": (lambda: reduce_metric(torch.ones(2), None, "max"), REDUCED),
}


def messages_of_the_one_that_stays(rank: int, world_size: int, port: int) -> dict[str, str]:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(1)  # whoever ends the process ends the connection too
        return {}
    messages = {}
    for name, (collective, _) in COLLECTIVES.items():
        with pytest.raises(LostRankError) as raised:
            collective()
        messages[name] = str(raised.value)
    return messages


def test_whoever_stays_says_what_the_lost_rank_did_not_come_to():
    messages = on_ranks(2, messages_of_the_one_that_stays)[0]
    for name, (_, doing) in COLLECTIVES.items():
        assert messages[name].startswith(f"rank 0 lost another rank while {doing}; "), messages[name]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("[/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31123: Connection reset by peer", True),
        ("[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation", True),
        ("Application timeout caused pair closure", True),
        ("Invalid scalar type", False),
    ],
)
def test_what_gloo_says_of_a_lost_rank_is_told_from_other_errors(message, told):
    """After a first timeout gloo has no more to say than the third."""
    assert tells_of_another_rank(RuntimeError(message)) is told
    assert not tells_of_another_rank(ValueError(message))
