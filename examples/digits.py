"""Trains on scikit-learn's digits under `strategy="det"` and records a ledger.

    python examples/digits.py --devices 1 --batch 64 --ledger runs/one
    python examples/digits.py --devices 2 --batch 16 --accumulate 2 --ledger runs/two
    det-lightning bisect runs/one runs/two          # match
    det-lightning replay runs/one --from 20 --to 40

One pixel of one sample changed, found:

    python examples/digits.py --pixel 700 --ledger runs/pixel
    det-lightning bisect runs/one runs/pixel --replay --html report.html     # diverge; open report.html

Run from the repository's root, so that replay can import `examples.digits`.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import det_lightning


class Classifier(L.LightningModule):
    """64 pixels, one hidden layer, 10 classes."""

    def __init__(self, hidden: int = 48):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def build(batch: int = 64, pixel: int | None = None) -> tuple[L.LightningModule, DataLoader]:
    """The entry that a ledger names: the same module and data, built again. `pixel`: of this sample one is changed."""
    L.seed_everything(7, verbose=False)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    if pixel is not None:
        images[pixel, 27] += 1 / 16
    return Classifier(), DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="samples of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pixel", type=int, help="change one pixel of this sample")
    parser.add_argument("--ledger", required=True, help="a new directory")
    arguments = parser.parse_args()
    entry_arguments = {"batch": arguments.batch, "pixel": arguments.pixel}
    module, loader = build(**entry_arguments)
    ledger = det_lightning.WeightLedger(
        arguments.ledger, entry="examples.digits:build", entry_arguments=entry_arguments
    )
    trainer = L.Trainer(
        strategy="det",
        accelerator="cpu",
        devices=arguments.devices,
        accumulate_grad_batches=arguments.accumulate,
        max_steps=arguments.steps,
        gradient_clip_val=0.5,
        callbacks=[ledger],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
