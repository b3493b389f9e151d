"""One training of the demonstration on one rank, under `det` or under stock `ddp`, in a group that already runs."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.weight_ledger import WeightLedger
from det_lightning.demo.impostor import float64_sums
from det_lightning.demo.network import CLIP, GLOBAL_BATCH, SEED, STEPS, digits_run
from det_lightning.demo.secret import draw_secret
from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.distributed.slice_loader import SliceLoader, SliceSampler
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy


@dataclass(frozen=True)
class RunPlan:
    """One configuration.

    Attributes:
        strategy: "det", "ddp" or "impostor": det's code with float64 sums under it.
        arrangement: key of a permutation of each step's samples over ranks and micro-batches, or None.
        ledger: directory to record into, or None.
        sealed_fault: file in which rank 0 seals the place of one bit that it draws and flips, or None.
    """

    strategy: str
    world_size: int
    accumulate: int
    threads: int = 1
    arrangement: int | None = None
    ledger: Path | None = None
    sealed_fault: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.world_size} x {self.accumulate}"


@dataclass(frozen=True)
class RunResult:
    """What rank 0 reports.

    Attributes:
        losses: float64 [STEPS], the mean over each global batch.
        weights: the final weights as little-endian float32, tensors by name.
        step_digests: SHA-256 of the weights after every step.
    """

    plan: RunPlan
    losses: np.ndarray
    weights: bytes
    step_digests: tuple[str, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.weights).hexdigest()


class _Recorder(Callback):
    """Losses and weight digests of every step. Under ddp the loss is the mean of the ranks' means."""

    def __init__(self):
        self.losses: list[float] = []
        self.digests: list[str] = []
        self._window: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        facts = getattr(trainer.strategy, "step_facts", None)
        self._window.append(outputs["loss"].detach().double())
        if trainer.global_step == len(self.losses):
            return
        if facts is not None:
            loss = facts.loss
        else:
            loss = torch.stack(self._window).sum()  # Lightning divided each by the accumulation
            dist.all_reduce(loss)
            loss = loss / trainer.world_size
        self._window = []
        self.losses.append(float(loss))
        self.digests.append(hashlib.sha256(weight_bytes(pl_module)).hexdigest())


def weight_bytes(module: LightningModule) -> bytes:
    """All parameters in order of their names, little-endian float32."""
    named = sorted(module.named_parameters())
    return b"".join(parameter.detach().numpy().astype("<f4").tobytes() for _, parameter in named)


def train(rank: int, world_size: int, port: int, plan: RunPlan) -> RunResult | None:
    """Runs one configuration; the result on rank 0, None elsewhere."""
    quiet_lightning()
    torch.set_num_threads(plan.threads)
    ranks = given_ranks(rank, world_size, port)
    recorder = _Recorder()
    callbacks: list[Callback] = [recorder]
    with float64_sums() if plan.strategy == "impostor" else nullcontext():
        module, loader = digits_run()
        if plan.sealed_fault is not None:
            sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
            secret = draw_secret(sizes, STEPS, plan.sealed_fault)
            callbacks.append(FaultInjector(secret.step, secret.parameter, secret.index, secret.bit))
        if plan.strategy == "ddp":
            strategy = DDPStrategy(cluster_environment=ranks)
            order = SampleOrder(len(loader.dataset), GLOBAL_BATCH, SEED, drop_last=True)
            sampler = SliceSampler(
                order,
                world_size=world_size,
                rank=rank,
                accumulate=plan.accumulate,
                steps_done=lambda: trainer.global_step,
            )
            loader = SliceLoader(loader, sampler)
        else:
            strategy = DetStrategy(cluster_environment=ranks, global_batch=GLOBAL_BATCH, seed=SEED)
            strategy.training_data.arrangement = plan.arrangement
        if plan.ledger is not None:
            callbacks.append(WeightLedger(plan.ledger, entry="det_lightning.demo.network:digits_run"))
        trainer = Trainer(
            accelerator="cpu",
            devices=plan.world_size,
            strategy=strategy,
            accumulate_grad_batches=plan.accumulate,
            max_steps=STEPS,
            max_epochs=-1,
            gradient_clip_val=CLIP,
            use_distributed_sampler=False,
            callbacks=callbacks,
            **QUIET_TRAINER,
        )
        try:
            trainer.fit(module, loader)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if rank != 0:
        return None
    losses = np.array(recorder.losses, dtype=np.float64)
    return RunResult(plan, losses, weight_bytes(module), tuple(recorder.digests))
