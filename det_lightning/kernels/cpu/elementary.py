"""Launches the elementary functions of `native.elementary`."""

import torch

from .machine_code import Kernel
from .threads import run_blocks
from .views import float32_words

_KERNELS = {name: Kernel("elementary", f"{name}_block") for name in ("exp", "log")}

_BLOCK = 1 << 12

DOUBT = 32
"""Units of 2^-53 around a tie in which the short evaluation is not trusted: twice its error bound."""


def elementwise(name: str, x: torch.Tensor, doubt: int = DOUBT) -> torch.Tensor:
    """The function `name` of every element of `x`, a checked float32 tensor. `doubt` changes the time only."""
    x = float32_words(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    total = x.numel()
    run_blocks(
        _KERNELS[name], -(-total // _BLOCK), 40 * total, x.data_ptr(), out.data_ptr(), _BLOCK, total, doubt
    )  # fmt: skip
    return out
