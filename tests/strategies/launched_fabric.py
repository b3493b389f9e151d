"""A script with Fabric as a user writes it: `python launched_fabric.py NAMESPACE STRATEGY DEVICES`."""

import hashlib
import sys
from importlib import import_module

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import det_lightning  # noqa: F401  registers the strategies


def main(fabric) -> None:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(36, 6, generator=generator), torch.randint(0, 3, (36,), generator=generator)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), 12 // fabric.world_size, shuffle=True))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5))
    for _ in range(2):
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    fabric.print(type(fabric.strategy).__module__, fabric.world_size, fabric.strategy.steps_done, digest)


if __name__ == "__main__":
    made = import_module(sys.argv[1]).Fabric(accelerator="cpu", strategy=sys.argv[2], devices=int(sys.argv[3]))
    made.launch(main)
