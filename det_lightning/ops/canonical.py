"""The one NaN: processors differ in NaN bits, so every NaN that leaves a covered operation is 0x7fc00000 (float32)."""

import torch


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor of the same shape with every NaN made the quiet, positive, empty one."""
    return x.masked_fill(x.isnan(), float("nan"))
