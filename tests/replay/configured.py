"""A model and a data module as LightningCLI builds them."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Network(LightningModule):
    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Data(LightningDataModule):
    def __init__(self, samples: int):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        x = torch.arange(4.0 * self.samples).reshape(self.samples, 4) / 64
        return DataLoader(TensorDataset(x, torch.arange(self.samples) % 3), batch_size=6, shuffle=True)
