"""The network of benchmarks that train: one whose step is products and little else."""

import torch
from lightning.pytorch import LightningModule


class Perceptron(LightningModule):
    """`layers` of `width` with ReLU, under AdamW and cross-entropy; behind them one of `classes`, if given."""

    def __init__(self, layers: int, width: int, classes: int | None = None):
        super().__init__()
        hidden = [layer for _ in range(layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.network = torch.nn.Sequential(*hidden, *([torch.nn.Linear(width, classes)] if classes else []))

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
