"""The rounded operations that optimizer sequences are made of: float32, on CPU and CUDA alike."""

import numpy as np
import torch

from det_lightning.ops.canonical import canonical_nan


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """RN(tensor RN(factor)): the factor is rounded to the tensor's format, then one product."""
    return tensor * torch.tensor(factor, dtype=tensor.dtype)


def divided(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """RN(tensor / RN(divisor)). The divisor lies on the tensor's device: CUDA multiplies by the reciprocal of a number
    that lies on the host, which rounds twice."""
    return tensor / torch.full((), divisor, dtype=tensor.dtype, device=tensor.device)


def store(target: torch.Tensor, value: torch.Tensor) -> None:
    """target = value rounded to target's format, in place, every NaN canonical: infinity minus infinity has other bits
    on other processors."""
    target.copy_(rounded(value, target.dtype))


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """RN(value) in another format, every NaN canonical (torch's cast to bfloat16 makes NaNs of its own)."""
    return canonical_nan(value.to(dtype))


def square_root(tensor: torch.Tensor) -> torch.Tensor:
    """RN(sqrt(tensor)), float32 or float64; on the CPU by NumPy.

    torch.sqrt is not correctly rounded everywhere: through MKL on an AMD processor 9 % of the significands came out one
    ulp off, in float32 and through float64 as well. On CUDA it is the IEEE operation.
    """
    return torch.from_numpy(np.sqrt(tensor.numpy())) if tensor.is_cpu else torch.sqrt(tensor)
