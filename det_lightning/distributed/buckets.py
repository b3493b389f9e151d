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
LEAST_APART = {"cuda": _MEBI}
"""Elements of a matrix, by kind of device, from which on its products are added to a window without full digits between:
that saves about 1 KB of traffic an element and micro-batch, and lets the host wait for the device once."""
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
        apart: (rows, columns) of the matrices that lie before all others, each of whole blocks: their sums are windows of
            their own.
        least_apart: from so many elements on products go through windows, also where rows are not of whole blocks; or None.
    """

    places: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    dtype: torch.dtype
    device: torch.device
    apart: tuple[tuple[int, int], ...] = ()
    least_apart: int | None = None


def _stands_apart(parameter: torch.Tensor, least: int | None) -> bool:
    """Whether its rows are of whole blocks and it is large enough."""
    whole = parameter.dim() == 2 and parameter.shape[1] % BLOCK == 0
    return least is not None and whole and parameter.numel() >= max(least, 1)


def fill_buckets(
    parameters: Sequence[torch.Tensor], *, most: int, parts: int, least_apart: int | None = None
) -> list[Bucket]:
    """Buckets of about `most` elements, from the last parameter to the first; one dtype and device each.

    Args:
        parts: into how many equal shares of whole blocks every bucket is to be cut.
        least_apart: elements from which on a matrix stands apart; None: none does.
    """
    buckets, waiting, elements = [], [], 0

    def close() -> None:
        nonlocal waiting, elements
        if waiting:
            first = parameters[waiting[0]]
            apart = [place for place in waiting if _stands_apart(parameters[place], least_apart)]
            offsets, end = {}, 0
            for place in sorted(waiting, key=lambda place: place not in apart):
                offsets[place], end = end, end + parameters[place].numel()
            whole = BLOCK * parts
            padded = max(-(-end // whole), 1) * whole
            shapes = tuple(tuple(parameters[place].shape) for place in apart)
            in_order = tuple(offsets[place] for place in waiting)
            buckets.append(Bucket(tuple(waiting), in_order, padded, first.dtype, first.device, shapes, least_apart))
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
