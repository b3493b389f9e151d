"""Which parameters travel together: buckets in the order in which a backward pass completes gradients, last layer first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 256
"""Elements of a bucket that share the lowest exponent of a window."""

BUCKET_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 23}
"""Gradient elements of a bucket: 8 or 32 MiB of float32, 336 or 1344 MiB while they are full digits. NCCL moves small
buckets at a fraction of its rate, and each costs the host a look at the device."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients lie side by side in one flat buffer.

    Attributes:
        places: of the parameters, in the order given.
        offsets: where each begins, in elements.
        elements: of the buffer, padded to whole blocks for every part.
    """

    places: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    device: torch.device


def fill_buckets(parameters: Sequence[torch.Tensor], *, most: int, parts: int) -> list[Bucket]:
    """Buckets of about `most` elements, from the last parameter to the first; one dtype and device each.

    Args:
        parts: into how many equal shares of whole blocks every bucket is to be cut.
    """
    buckets, waiting, elements = [], [], 0

    def close() -> None:
        nonlocal waiting, elements
        if waiting:
            first = parameters[waiting[0]]
            sizes = [parameters[place].numel() for place in waiting]
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            whole = BLOCK * parts
            padded = max(-(-sum(sizes) // whole), 1) * whole
            buckets.append(Bucket(tuple(waiting), tuple(offsets), padded, first.dtype, first.device))
        waiting, elements = [], 0

    for place in range(len(parameters) - 1, -1, -1):
        parameter = parameters[place]
        kind = (parameter.dtype, parameter.device)
        if waiting and (elements >= most or kind != (parameters[waiting[0]].dtype, parameters[waiting[0]].device)):
            close()
        waiting.append(place)
        elements += parameter.numel()
    close()
    return buckets
