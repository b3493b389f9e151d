"""The rounded operations that optimizer sequences are made of."""

import numpy as np
import torch

from det_lightning.ops.canonical import canonical_nan


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """RN(tensor RN(factor)): the factor is rounded to the tensor's format, then one product."""
    return tensor * torch.tensor(factor, dtype=tensor.dtype)


def store(target: torch.Tensor, value: torch.Tensor) -> None:
    """target = value, in place, every NaN canonical: infinity minus infinity has other bits on other processors."""
    target.copy_(canonical_nan(value))


def square_root(tensor: torch.Tensor) -> torch.Tensor:
    """RN(sqrt(tensor)) of a CPU tensor, by NumPy.

    torch.sqrt is not correctly rounded everywhere: through MKL on an AMD processor 9 % of the significands came out one
    ulp off, in float32 and through float64 as well.
    """
    return torch.from_numpy(np.sqrt(tensor.numpy()))
