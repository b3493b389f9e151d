"""Launches the elementary functions of `cuda_src/elementary.cu`. The twin of `cpu.elementary`."""

import torch

from .cuda import launch, multiprocessors, plain

_THREADS = 256


def elementwise(name: str, x: torch.Tensor, *, only_pairs: bool = False) -> torch.Tensor:
    """The function `name` of every element of `x`, a checked float32 tensor. `only_pairs` changes the time only."""
    x = plain(x).contiguous()
    out = torch.empty_like(x)
    if x.numel():
        blocks = min(-(-x.numel() // (4 * _THREADS)), 8 * multiprocessors(x.device.index))
        launch(
            x.device, "elementary", f"elementary_{name}", (blocks,), _THREADS,
            x.data_ptr(), out.data_ptr(), x.numel(), int(only_pairs),
        )  # fmt: skip
    return out
