"""The rounded operations that optimizer sequences are made of."""

import numpy as np
import torch


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """RN(tensor RN(factor)): the factor is rounded to the tensor's format, then one product."""
    return tensor * torch.tensor(factor, dtype=tensor.dtype)


def square_root(tensor: torch.Tensor) -> torch.Tensor:
    """RN(sqrt(tensor)) of a CPU tensor, by NumPy.

    torch.sqrt is not correctly rounded everywhere: through MKL on an AMD processor 9 % of the significands came out one
    ulp off, in float32 and through float64 as well.
    """
    return torch.from_numpy(np.sqrt(tensor.numpy()))
