"""Tensors as arrays of integers, and back: floats enter and leave kernels as bit patterns."""

import numpy as np
import torch

from ...arithmetic.formats import Format

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def float32_bits(tensor: torch.Tensor) -> np.ndarray:
    """The int32 patterns of a contiguous float32 copy (or view) of `tensor`: bfloat16 and float16 convert exactly."""
    return tensor.detach().to(torch.float32).contiguous().view(torch.int32).numpy()


def from_bits(bits: torch.Tensor, form: Format) -> torch.Tensor:
    """The float tensor whose patterns stand in the int32 tensor `bits`."""
    if form.bits == 16:
        bits = bits.to(torch.int16)
    return bits.view(_DTYPES[form.name])
