"""Small trainings whose every step is kept as bytes, under `det` and, as the control that must fail, under `ddp`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy

FEATURES, HIDDEN, CLASSES = 12, 16, 5


class Network(LightningModule):
    """Two linear layers and a rectifier; momentum SGD on the cross-entropy.

    Args:
        schedule: None, or the interval of an LR scheduler: "step" or "epoch".
    """

    def __init__(self, *, rate: float = 0.2, schedule: str | None = None, seed: int = 3):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.nn.Linear(FEATURES, HIDDEN)
        self.output = torch.nn.Linear(HIDDEN, CLASSES)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        self.rate, self.schedule = rate, schedule

    def forward(self, x):
        return self.output(F.relu(self.hidden(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("validation_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


def spread_samples(count: int, *, seed: int = 5, spread: int = 6) -> TensorDataset:
    """Features whose magnitudes differ by up to 2^(2 spread), so that sums in float32 depend on their order."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (count, FEATURES), generator=generator)
    x = torch.ldexp(torch.rand(count, FEATURES, generator=generator) - 0.5, exponents)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


@dataclass(frozen=True)
class Split:
    """How a global batch is cut: ranks, samples of a micro-batch, micro-batches of a step."""

    world_size: int
    batch: int
    accumulate: int

    def __str__(self) -> str:
        return f"{self.world_size}x{self.batch}x{self.accumulate}"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        strategy: "det" or "ddp".
        samples: length of the data set.
        data: (how many samples) -> data set.
        build: () -> LightningModule.
        loader: more arguments of the training DataLoader.
        loaders: what the Trainer gets instead of a DataLoader over the data, or None.
        validation: length of a validation set, or None.
        options: of DetStrategy.
        trainer: more arguments of the Trainer.
        checkpoint: file to save after the fit, or None.
        save_every: steps between checkpoints that ModelCheckpoint writes beside `checkpoint`, or None.
        resume: checkpoint to start from, or None.
    """

    split: Split = Split(1, 24, 1)
    strategy: str = "det"
    steps: int = 12
    samples: int = 96
    data: Callable[[int], Any] = spread_samples
    build: Callable[[], LightningModule] = Network
    loader: dict[str, Any] = field(default_factory=dict)
    loaders: Any = None
    validation: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    arrangement: int | None = None
    ledger: Path | None = None
    checkpoint: Path | None = None
    save_every: int | None = None
    resume: Path | None = None
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a training was, in bytes.

    Attributes:
        weights: after each step (and first: before), all parameters in order of names.
        optimizer: its state at the end, likewise.
        rates: the learning rate after each step.
    """

    weights: list[bytes]
    losses: list[bytes]
    optimizer: bytes
    rates: list[float]
    global_step: int
    epoch: int
    logged: dict[str, float]


class _Record(Callback):
    def __init__(self):
        self.weights, self.losses, self.rates = [], [], []

    def on_train_start(self, trainer, pl_module) -> None:
        self.step = trainer.global_step
        self.weights.append(bytes_of(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        facts = getattr(trainer.strategy, "step_facts", None)
        loss = facts.loss if facts is not None else outputs["loss"].detach()
        self.weights.append(bytes_of(pl_module))
        self.losses.append(raw(loss))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def bytes_of(module: torch.nn.Module) -> bytes:
    """All parameters in order of their names."""
    return b"".join(raw(tensor) for _, tensor in sorted(module.named_parameters()))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, bfloat16 included."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def train(rank: int, world_size: int, port: int, run: Run) -> Outcome:
    """Runs one training on one rank."""
    quiet_lightning()
    warnings.filterwarnings("ignore")
    ranks = given_ranks(rank, world_size, port)
    strategy = DDPStrategy(cluster_environment=ranks)
    if run.strategy == "det":
        strategy = DetStrategy(cluster_environment=ranks, **run.options)
        strategy.training_data.arrangement = run.arrangement
    record = _Record()
    callbacks: list[Callback] = [*run.callbacks, record]
    arguments = dict(QUIET_TRAINER)
    if run.ledger is not None:
        callbacks.append(WeightLedger(run.ledger))
    if run.save_every is not None:
        arguments.pop("enable_checkpointing")
        callbacks.append(
            ModelCheckpoint(run.checkpoint.parent, every_n_train_steps=run.save_every, save_top_k=-1, filename="{step}")
        )
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": world_size,
            "strategy": strategy,
            "accumulate_grad_batches": run.split.accumulate,
            "max_steps": run.steps,
            "max_epochs": -1,
            "gradient_clip_val": 0.05,
            "num_sanity_val_steps": 0,
            **arguments,
            **run.trainer,
        },
        callbacks=callbacks,
    )
    module = run.build()
    loader = run.loaders
    if loader is None:
        loader = DataLoader(run.data(run.samples), batch_size=run.split.batch, **run.loader)
    validation = None if run.validation is None else DataLoader(run.data(run.validation), batch_size=4)
    try:
        trainer.fit(module, loader, validation, ckpt_path=run.resume)
        if run.checkpoint is not None and run.save_every is None:
            trainer.save_checkpoint(run.checkpoint)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    states = [
        tensor
        for _, parameter in sorted(module.named_parameters())
        for _, tensor in sorted(trainer.optimizers[0].state[parameter].items())
    ]
    return Outcome(
        record.weights,
        record.losses,
        b"".join(raw(tensor) for tensor in states if isinstance(tensor, torch.Tensor)),
        record.rates,
        trainer.global_step,
        trainer.current_epoch,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    )


def train_each(rank: int, world_size: int, port: int, runs: list[Run], ports: list[int]) -> list[Outcome]:
    """Several trainings on one rank, one after another in one process: what a process costs is paid once."""
    return [train(rank, world_size, other, run) for other, run in zip([port, *ports], runs, strict=True)]
