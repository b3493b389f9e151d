"""A Trainer for the tests of the strategies."""

import pytest
import torch.distributed as dist

from det_lightning.strategies.given_ranks import free_port
from tests.strategies.small_fits import trainer_of


@pytest.fixture
def trainer():
    """() -> a Trainer with one rank in this process."""
    yield lambda *callbacks, **arguments: trainer_of(0, 1, free_port(), *callbacks, **arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
