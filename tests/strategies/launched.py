"""A training script as a user writes it: `python launched.py NAMESPACE STRATEGY DEVICES OUT`.

Importable modules and the script share this file, because spawn imports the main module again in each worker.
"""

import hashlib
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import det_lightning  # noqa: F401  registers the strategies


def make(namespace: str):
    """A LightningModule of this namespace; it leaves the digest of its weights in a file when training ends."""
    base = import_module(namespace).LightningModule

    class Model(base):
        def __init__(self, out: str):
            super().__init__()
            torch.manual_seed(4)
            self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
            self.out = out

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)

        def train_dataloader(self):
            generator = torch.Generator().manual_seed(7)
            x, y = torch.randn(36, 6, generator=generator), torch.randint(0, 3, (36,), generator=generator)
            return DataLoader(TensorDataset(x, y), batch_size=12 // self.trainer.world_size, shuffle=True)

        def on_train_end(self):
            assert type(self.layers[0]).__name__ == "DetLinear"
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.parameters())).hexdigest()
            if self.trainer.is_global_zero:
                Path(self.out).write_text(f"{self.trainer.world_size} {self.trainer.global_step} {digest}")

    Model.__qualname__ = "Model"
    return Model


ARGUMENTS = {
    "accelerator": "cpu",
    "max_steps": 7,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(namespace: str, strategy: str, devices: int, out: str) -> None:
    warnings.filterwarnings("ignore")
    trainer = import_module(namespace).Trainer(strategy=strategy, devices=devices, **ARGUMENTS)
    trainer.fit(Model(out) if namespace == "lightning.pytorch" else make(namespace)(out))


Model = make("lightning.pytorch") if "lightning.pytorch" in sys.argv else None

if __name__ == "__main__":
    fit(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
