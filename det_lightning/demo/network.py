"""The demonstration's training: scikit-learn's handwritten digits and a small network, built the same everywhere.

Nothing here depends on libm, on the vector width or on torch's generators: images are integers over 16, first weights
come from counter-based bits through one exact product, and the rest is the contract's arithmetic.
"""

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from det_lightning.distributed.random_bits import permutation, uniform_float32
from det_lightning.ops.gemm import det_gemm

GLOBAL_BATCH = 64
STEPS = 160
SEED = 2026
CLIP = 0.5
_PIXELS, _HIDDEN, _CLASSES = 64, 32, 10


class DigitsNetwork(LightningModule):
    """64 pixels -> 32 rectified units -> 10 classes; momentum SGD on the cross-entropy."""

    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(_PIXELS, _HIDDEN)
        self.output = torch.nn.Linear(_HIDDEN, _CLASSES)
        with torch.no_grad():
            for place, layer in enumerate((self.hidden, self.output)):
                layer.weight.copy_(first_weights(layer.out_features, layer.in_features, place))
                layer.bias.zero_()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.output(F.relu(self.hidden(images))), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.875)


def first_weights(rows: int, columns: int, place: int) -> torch.Tensor:
    """float32 [rows, columns]: sums whose huge terms cancel exactly.

    Each weight is a product of 16 + 2 x 16 terms: 16 ordinary ones, and 16 of up to 2^80 that stand there twice with
    opposite signs. The exact sum is that of the ordinary terms. A sum in float64 keeps 53 bits of the largest.
    """
    small = [uniform_float32(SEED, shape, place, side) for side, shape in enumerate(((rows, 16), (columns, 16)))]
    large = [uniform_float32(SEED, shape, place, side + 2) for side, shape in enumerate(((rows, 16), (columns, 16)))]
    spread = np.ldexp(np.float32(1), np.arange(16, dtype=np.int32) * 5 - 40).astype(np.float32)
    left = np.concatenate([small[0], large[0] * spread, -large[0] * spread], axis=1)
    right = np.concatenate([small[1], large[1] * spread, large[1] * spread], axis=1)
    order = permutation(SEED, left.shape[1], place)
    scale = np.float32(0.125)
    return det_gemm(torch.from_numpy(left[:, order] * scale), torch.from_numpy(np.ascontiguousarray(right[:, order])))


def digits_loader() -> DataLoader:
    """The 1,797 images as float32 in [0, 1], exact multiples of 1/16, with their labels."""
    digits = load_digits()
    images = torch.from_numpy((digits.data / 16.0).astype(np.float32))
    labels = torch.from_numpy(digits.target.astype(np.int64))
    return DataLoader(TensorDataset(images, labels), batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)


def digits_run() -> tuple[LightningModule, DataLoader]:
    """The entry of the demonstration's ledgers."""
    return DigitsNetwork(), digits_loader()
