"""One training with one planted change each: what people hunt for when two runs part. Used as entry and as recorder."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from det_lightning.replay.group import worker_group
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import free_port, given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy

STEPS = 8
ENTRY = "tests.replay.planted:build"
PLANTED_STEP = 5  # where a change that sets in during the run sets in
SAMPLES, WIDTH = 48, 6


class Pictures(Dataset):
    """Sample i is a pure function of i; `plant` changes one of them, or the augmentation of all."""

    def __init__(self, plant: str):
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 4
        self.scale = 1.5 if plant == "augmentation" else 1.25
        if plant == "sample":
            self.x[[17, 30]], self.y[[17, 30]] = self.x[[30, 17]], self.y[[30, 17]]
        if plant == "pixel":
            self.x[17, 4] = torch.nextafter(self.x[17, 4], torch.tensor(9.0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index] * (self.scale if index % 2 else 1.0), self.y[index]


class Skewed(torch.autograd.Function):
    """The identity, with a gradient that is not quite its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.0 + 2.0**-20)


class Average(Callback):
    """Keeps an exponential average of the first weight in a buffer; a stale one averages the weights before the step."""

    def __init__(self, *, stale: bool):
        super().__init__()
        self.stale = stale

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.before = pl_module.first.weight.detach().clone()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        late = self.stale and trainer.global_step >= PLANTED_STEP
        with torch.no_grad():
            pl_module.average.mul_(0.75).add_((self.before if late else pl_module.first.weight) * 0.25)


class Foreign(Callback):
    """Changes one element of the first weight past PyTorch, and one gradient through it, as `plant` says."""

    def __init__(self, plant: str):
        super().__init__()
        self.plant = plant

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self.plant == "gradient" and trainer.global_step + 1 == PLANTED_STEP:
            pl_module.middle.bias.grad.zero_()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.plant == "foreign" and trainer.global_step == PLANTED_STEP:
            pl_module.first.weight.detach().numpy()[2, 1] += 0.25


class Network(LightningModule):
    def __init__(self, plant: str, *, dropout: bool, shared_buffer: bool, noisy: bool):
        super().__init__()
        self.noisy = noisy
        self.plant, self.dropout, self.shared_buffer = plant, dropout, shared_buffer
        self.first, self.middle, self.last = (
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, 4),
        )
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        self.register_buffer("average", torch.zeros_like(self.first.weight))
        self.register_buffer("level", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        late = self.trainer.global_step + 1 >= PLANTED_STEP
        first, second = (self.middle, self.first) if self.plant == "order" and late else (self.first, self.middle)
        hidden = F.relu(second(F.relu(first(x))))
        if self.plant == "dropout" and late:
            torch.manual_seed(1234)
        if self.dropout:
            hidden = F.dropout(hidden, 0.25)
        if self.plant == "rank" and late and self.global_rank == 1:
            hidden = hidden * hidden
        if self.plant == "backward" and late:
            hidden = Skewed.apply(hidden)
        if self.noisy:
            self.log("clock", torch.tensor(time.time_ns()) * 1.0)
        logits = self.last(hidden)
        if self.plant == "code" and late:
            logits = logits * 1.25
        logits = logits * (float("nan") if self.plant == "nan" and late else 1.0)
        if self.shared_buffer:
            level = x.detach().abs().amax()
            if not (self.plant == "buffer" and late):
                dist.all_reduce(level, op=dist.ReduceOp.MAX)
            self.level.copy_(level)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        weights = [p for n, p in self.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        groups = [
            {"params": weights, "weight_decay": 0.125},
            {"params": biases, "weight_decay": 0.125 if self.plant == "decay" else 0.0},
        ]
        if self.plant.startswith("eps"):
            return torch.optim.Adam(groups, lr=0.125, eps=1e-6 if self.plant == "eps changed" else 1e-8)
        optimizer = torch.optim.SGD(groups, lr=0.375 if self.plant == "rate" else 0.25, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3 if self.plant == "scheduler" else 4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(
    plant: str = "", dropout: bool = False, shared_buffer: bool = False, average: bool = False, noisy: bool = False
):
    quiet_lightning()
    module = Network(plant, dropout=dropout, shared_buffer=shared_buffer, noisy=noisy)
    callbacks = [Average(stale=plant == "average")] if average else []
    return module, DataLoader(Pictures(plant), batch_size=6, shuffle=True), [*callbacks, Foreign(plant)]


def record(
    ledger: Path,
    *,
    strategy: str = "det",
    fault: tuple[int, str, int, int] | None = None,
    rank: int = 0,
    world: int = 1,
    port: int | None = None,
    saved: Path | None = None,
    seed: int = 4,
    precision: str = "32-true",
    accelerator: str = "cpu",
    kept: int | None = None,
    **options,
) -> None:
    """Trains STEPS steps and records them."""
    seed_everything(7, verbose=False)
    module, loader, callbacks = build(**options)
    cluster = given_ranks(rank, world, port or free_port())
    trainer = Trainer(
        accelerator=accelerator,
        devices=world,
        strategy={
            "det": lambda: DetStrategy(seed=seed, cluster_environment=cluster, global_batch=12),
            "ddp": lambda: DDPStrategy(
                cluster_environment=cluster, process_group_backend="gloo" if accelerator == "cpu" else None
            ),
            "auto": lambda: "auto",
        }[strategy](),
        max_steps=STEPS,
        precision=precision,
        callbacks=[
            *callbacks,
            *([FaultInjector(*fault)] if fault else []),
            WeightLedger(ledger, entry=ENTRY, entry_arguments=options, keep_leaves=kept),
            *([ModelCheckpoint(saved, every_n_train_steps=2, save_top_k=-1, filename="{step}")] if saved else []),
        ],
        **(QUIET_TRAINER | {"enable_checkpointing": saved is not None}),
    )
    try:
        trainer.fit(module, loader)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def build_with_another_rate():
    return build(plant="rate")


def build_plain():
    seed_everything(7, verbose=False)
    return build()


def build_code():
    seed_everything(7, verbose=False)
    return build(plant="code")


def record_with_checkpoints(folder: Path, **options) -> None:
    """A ledger in `folder`/ledger and a checkpoint of every second step in `folder`/saved."""
    record(folder / "ledger", saved=folder / "saved", **options)


def record_on_ranks(ledger: Path, *, world: int = 1, **options) -> None:
    """As `record`, in as many processes as there are ranks."""
    if world == 1:
        record(ledger, **options)
    else:
        with worker_group(world, on_gpus=options.get("accelerator") == "gpu") as group:
            group.run(record_rank, world, ledger, options)


def record_rank(rank: int, world: int, port: int, ledger: Path, options: dict) -> None:
    record(ledger, rank=rank, world=world, port=port, **options)
