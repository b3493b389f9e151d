"""The digest lanes of many tensors in one call. The twin of `cuda_digest_batch`."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..digest_place import Place
from .digest import block_lanes, lanes_tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def many_lanes(
    first: torch.Tensor, tensors: Sequence[torch.Tensor], places: Sequence[Place | None] | None
) -> torch.Tensor:
    """The lanes of each tensor as int64 [tensors, 2], on checked arguments; first: of the tensors.

    places: of the elements within a larger tensor; None: the tensor is all of it.
    """
    lanes = torch.empty((len(tensors), 2), dtype=torch.int64)
    for row, (tensor, place) in enumerate(zip(tensors, places or [None] * len(tensors), strict=True)):
        if place is None and tensor.numel() == 1 and not tensor.is_complex():
            lanes[row] = _of_one(tensor.dtype, _bits(tensor))
        else:
            parts = block_lanes(tensor, place, lanes.data_ptr() + row * lanes.stride(0) * lanes.element_size())
            if parts is not None:
                lanes[row] = parts.sum(0)  # modulo 2^64
    return lanes


def _bits(tensor: torch.Tensor) -> int:
    return tensor.detach().resolve_neg().view(_INTEGERS[tensor.element_size()]).item()


@lru_cache(maxsize=1024)
def _of_one(dtype: torch.dtype, bits: int) -> torch.Tensor:
    """Of a single element: optimizers count steps for each parameter, and all of them count the same."""
    return lanes_tensor(torch.tensor([bits], dtype=_INTEGERS[dtype.itemsize]).view(dtype))
