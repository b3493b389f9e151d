"""A model, a data module and a callback as LightningCLI builds them."""

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
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


class Shrinking(Callback):
    """Halves the weights after every step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        with torch.no_grad():
            pl_module.net.weight.mul_(0.5)


class Data(LightningDataModule):
    def __init__(self, samples: int):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        x = torch.arange(4.0 * self.samples).reshape(self.samples, 4) / 64
        return DataLoader(TensorDataset(x, torch.arange(self.samples) % 3), batch_size=6, shuffle=True)
