"""Every rank begins with the state of the first, and none drifts."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.claims.processes import on_ranks
from tests.claims.test_world_size import trained
from tests.claims.trainings import Network, Split, bytes_of, spread_samples
from tests.strategies.small_fits import PLAIN, Logging, plain, trainer_of


class Buffers(Network):
    """Ranks begin with different states, and with tensors that collectives are fussy about."""

    def __init__(self):
        super().__init__(seed=3 + (dist.get_rank() if dist.is_initialized() else 0))
        self.hidden.weight = nn.Parameter(self.hidden.weight.detach().t().contiguous().t())
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("rough", torch.rand(3).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("phase", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("short", torch.randint(99, (3, 2), dtype=torch.int16).t())


def train_unlike(rank, world_size, port):
    torch.manual_seed(rank)
    module = Buffers()
    with torch.no_grad():
        module.output.weight += rank
    one = trainer_of(rank, world_size, port, max_steps=3)
    one.fit(module, DataLoader(spread_samples(48), batch_size=12 // world_size))
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in module.buffers()]
    return bytes_of(module), [buffer.float().numpy().tobytes() for buffer in buffers]


def test_every_rank_starts_from_the_state_of_the_first():
    ranks = on_ranks(2, train_unlike)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == on_ranks(1, train_unlike)[0][0]


def test_no_rank_drifts_when_ranks_log_and_validate(tmp_path):
    run = replace(PLAIN, split=Split(3, 2, 2), build=Logging, validation=7, trainer={"num_sanity_val_steps": 2})
    assert trained(run).weights == plain()
