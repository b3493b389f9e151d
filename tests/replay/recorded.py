"""A run that is recorded with an entry, and the same entry with one thing changed."""

from pathlib import Path

import torch
import torch.nn.functional as F
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy

STEPS = 14
ENTRY = "tests.replay.recorded:build"


class Network(LightningModule):
    """Two linears; from `changed_step` on the logits are doubled, as a change of the code would.

    `counter`: what counts the calls of training_step and shifts the logits, "attribute", "buffer" or none.
    """

    def __init__(self, rate: float, changed_step: int | None, counter: str):
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first, self.second = torch.nn.Linear(8, 12), torch.nn.Linear(12, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        self.rate, self.changed_step, self.counter = rate, changed_step, counter
        self.calls = 0
        self.register_buffer("kept_calls", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.second(F.relu(self.first(x)))
        if self.changed_step is not None and self.trainer.global_step + 1 >= self.changed_step:
            logits = logits * 2.0
        if self.counter:
            self.calls += 1
            self.kept_calls += 1
            logits = logits * (0.0625 * (self.calls if self.counter == "attribute" else self.kept_calls))
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.5)


def build(rate: float = 0.25, changed_step: int | None = None, counter: str = ""):
    generator = torch.Generator().manual_seed(12)
    x, y = torch.randn(50, 8, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    return Network(rate, changed_step, counter), DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)


def build_changed():
    return build(changed_step=9)


def build_with_another_rate():
    return build(rate=0.26)


def build_that_raises():
    raise RuntimeError("the data set is gone")


def build_something_else():
    return 42


def record(folder: Path, *, fault: tuple[int, str, int, int] | None = None, save_every: int | None = None, **options):
    """Trains STEPS steps in this process and records them in `folder`/ledger; returns the final weights."""
    quiet_lightning()
    module, loader = build(**options)
    callbacks = [] if fault is None else [FaultInjector(*fault)]
    callbacks.append(WeightLedger(folder / "ledger", entry=ENTRY, entry_arguments=options))
    arguments = dict(QUIET_TRAINER)
    if save_every is not None:
        arguments.pop("enable_checkpointing")
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=save_every, save_top_k=-1, filename="{step}"))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DetStrategy(seed=4),
        max_steps=STEPS,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        **arguments,
    )
    try:
        trainer.fit(module, loader)
    finally:
        torch.distributed.destroy_process_group()
    return {name: parameter.detach().numpy().tobytes() for name, parameter in module.named_parameters()}
