"""Case C09: parameters and optimizer state are whole on every rank; what cuts them over ranks is refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

from tests.claims.processes import Failed, on_ranks
from tests.claims.trainings import Network, Run, Split, train


class ShardedState(Network):
    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


class Once(Network):
    """Changes the model when the process group is up, once."""

    def configure_model(self):
        if not hasattr(self, "changed"):
            self.changed = True
            self.change()


class ShardedLayer(Once):
    def change(self):
        fully_shard(self.hidden, mesh=init_device_mesh("cpu", (2,)))


class ShardedWeight(Once):
    def change(self):
        mesh = init_device_mesh("cpu", (2,))
        self.hidden.weight = nn.Parameter(distribute_tensor(self.hidden.weight.detach(), mesh, [Shard(0)]))


class Wrapped(Once):
    def change(self):
        self.hidden = nn.parallel.DistributedDataParallel(self.hidden)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (ShardedState, {}, "ZeroRedundancyOptimizer cuts its state over the ranks"),
        (ShardedState, {"stock_optimizers": True}, "ZeroRedundancyOptimizer cuts its state over the ranks"),
        (ShardedLayer, {}, "the module hidden is a FSDPLinear, which cuts parameters"),
        (ShardedWeight, {}, r"the parameter hidden\.weight is cut over ranks"),
        (Wrapped, {}, "the module hidden is a DistributedDataParallel"),
    ],
)
def test_C09_sharded_state_and_parameters_are_refused_by_name(build, options, message):
    with pytest.raises(Failed, match=message):
        on_ranks(2, train, Run(build=build, split=Split(2, 4, 1), steps=2, samples=24, options=options))
