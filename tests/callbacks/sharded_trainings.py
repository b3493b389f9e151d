"""A small network, trained whole and in shards, with a ledger."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from det_lightning.callbacks.plain_ledger import PlainLedger
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import given_ranks

STEPS = 3


def join(rank, world_size, port):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


class Network(torch.nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second, self.third = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 3)
        self.frozen = torch.nn.Parameter(torch.zeros(11), requires_grad=False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x):
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


def batch(step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def train(path, model):
    """Every rank sees the whole batch, so that the mean of the ranks' gradients is each rank's gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with PlainLedger(path, model, optimizer) as ledger:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            ledger.before_step()
            optimizer.step()
            ledger.after_step(batch=batch(step))


def train_whole(path):
    train(path, Network())


def train_fully_sharded(rank, world_size, port, path):
    join(rank, world_size, port)
    from torch.distributed.fsdp import fully_shard

    model, mesh = Network(), init_device_mesh("cpu", (world_size,))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    train(path, model)
    dist.destroy_process_group()


def train_with_flat_parameters(rank, world_size, port, path):
    join(rank, world_size, port)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        Network(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    )
    train(path, wrapped)
    dist.destroy_process_group()


class Module(LightningModule):
    """`Network` under a Trainer; cut in `configure_model` where the strategy has a mesh."""

    def __init__(self):
        super().__init__()
        self.net = Network()

    def configure_model(self):
        if getattr(self, "device_mesh", None) is not None:
            from torch.distributed.fsdp import fully_shard

            for layer in (self.net.first, self.net.second, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(path, *, devices=1, **options):
    """Every rank sees every batch."""
    quiet_lightning()
    loader = torch.utils.data.DataLoader([(batch(step),) for step in range(STEPS)], batch_size=None)
    options = {"accelerator": "cpu", **options}
    callbacks = [WeightLedger(path)]
    trainer = Trainer(
        devices=devices, max_epochs=1, callbacks=callbacks, use_distributed_sampler=False, **options, **QUIET_TRAINER
    )
    trainer.fit(Module(), loader)


def fit_sharded(rank, world_size, port, path):
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    fit(path, devices=world_size, strategy=strategy, plugins=[given_ranks(rank, world_size, port)])
    dist.destroy_process_group()
