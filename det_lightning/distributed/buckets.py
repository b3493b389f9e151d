"""Which parameters travel together: buckets in the order in which a backward pass completes gradients, last layer first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from det_lightning.arithmetic.formats import NB

BLOCK = 256
"""Elements of a bucket that share the lowest exponent of a window."""

_MEBI = 1 << 20
_CPU_ELEMENTS = 2 * _MEBI
_MOST_ELEMENTS = 20 * _MEBI
_MEMORY_SHARE = 40
"""A bucket's full digits take at most this part of a GPU's memory; they live while its backward pass runs."""


def bucket_elements_for(device: torch.device) -> int:
    """About how many gradient elements of a device travel together.

    NCCL moves small buckets at a fraction of its rate, and each costs the host a look at the device: 20 Mi elements, 80 MiB
    of float32, if the GPU's memory allows. On a CPU 2 Mi, which the caches still notice.
    """
    if device.type != "cuda":
        return _CPU_ELEMENTS
    bytes_at_most = torch.cuda.get_device_properties(device).total_memory // _MEMORY_SHARE
    return min(max(bytes_at_most // (8 * NB) // _MEBI, 1) * _MEBI, _MOST_ELEMENTS)


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
