"""The digest lanes of many tensors in one call. The twin of `cuda_digest_batch`."""

from collections.abc import Sequence

import torch

from ..digest_place import Place
from .digest import lanes_tensor


def many_lanes(places: Sequence[Place | None], *tensors: torch.Tensor) -> torch.Tensor:
    """The lanes of each tensor as int64 [tensors, 2].

    places: of the elements within a larger tensor; None: the tensor is all of it.
    """
    return torch.stack([lanes_tensor(tensor, place) for tensor, place in zip(tensors, places, strict=True)])
