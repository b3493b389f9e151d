"""Launches the digest lanes of `native.digest`."""

import torch

from ...arithmetic.formats import FORMATS
from ..digest_place import Place, whole
from .machine_code import Kernel
from .threads import run_blocks

_lanes_block = Kernel("digest", "lanes_block")
_float64_lanes_block = Kernel("digest", "float64_lanes_block")

_BLOCK_WORDS = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16}
# What NaNs are known by: the bits without the sign, an infinity's, the canonical NaN's; of float64 their upper words.
_NANS = {getattr(torch, name): (form.sign_bit - 1, form.infinity_bits, form.nan_bits) for name, form in FORMATS.items()}
_NANS[torch.float64] = tuple(bits >> 32 for bits in _NANS[torch.float64][1:])
_LANE_MASK = (1 << 64) - 1


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The lanes of `tensor` in row-major order, on a checked argument."""
    first, second = lanes_tensor(tensor).tolist()
    return first & _LANE_MASK, second & _LANE_MASK


def lanes_tensor(tensor: torch.Tensor, place: Place | None = None) -> torch.Tensor:
    """The lanes of `tensor` in row-major order as int64 [2]; place: of its elements within a larger tensor."""
    lanes = torch.empty(2, dtype=torch.int64)
    parts = block_lanes(tensor, place, lanes.data_ptr())
    return lanes if parts is None else parts.sum(0)  # modulo 2^64


def block_lanes(tensor: torch.Tensor, place: Place | None, address: int) -> torch.Tensor | None:
    """Writes the two lanes of a tensor of one block to `address`; of another returns those of its blocks, int64 [blocks, 2],
    which are to be added modulo 2^64."""
    if tensor.is_complex():
        tensor, place = torch.view_as_real(tensor.detach().resolve_conj()), place and place.times(2)
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    nans, size = _NANS.get(tensor.dtype), tensor.element_size()
    if size < 4:
        # One zero-extended word for each element.
        tensor = tensor.detach().view(_INTEGERS[size]).to(torch.int32).bitwise_and_((1 << 8 * size) - 1)
    words_each = max(size // 4, 1)
    total = tensor.numel() * words_each
    first, run, stride = (place or whole(tensor.numel())).times(words_each)
    blocks_a_run = -(-run // _BLOCK_WORDS)
    blocks = total // run * blocks_a_run
    parts = None if blocks == 1 else torch.empty((blocks, 2), dtype=torch.int64)
    words = (tensor.data_ptr(), _BLOCK_WORDS, blocks_a_run, first, run, stride)
    # Without a format no word is a NaN: nothing exceeds infinity under a mask of no bits.
    kernel = _float64_lanes_block if tensor.dtype is torch.float64 else _lanes_block
    run_blocks(kernel, blocks, 8 * total, *words, *(nans or (0, 0, 0)), address if parts is None else parts.data_ptr())
    return parts
