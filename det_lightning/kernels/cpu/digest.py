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
_FORMS = {getattr(torch, name): form for name, form in FORMATS.items()}
_LANE_MASK = (1 << 64) - 1


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The lanes of `tensor` in row-major order, on a checked argument."""
    first, second = lanes_tensor(tensor).tolist()
    return first & _LANE_MASK, second & _LANE_MASK


def lanes_tensor(tensor: torch.Tensor, place: Place | None = None) -> torch.Tensor:
    """The lanes of `tensor` in row-major order as int64 [2]; place: of its elements within a larger tensor."""
    if tensor.is_complex():
        tensor, place = torch.view_as_real(tensor.detach().resolve_conj()), place and place.times(2)
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    form, size = _FORMS.get(tensor.dtype), tensor.element_size()
    if size < 4:
        # One zero-extended word for each element.
        tensor = tensor.detach().view(_INTEGERS[size]).to(torch.int32).bitwise_and_((1 << 8 * size) - 1)
    total = tensor.numel() * max(size // 4, 1)
    first, run, stride = (place or whole(tensor.numel())).times(max(size // 4, 1))
    blocks_a_run = -(-run // _BLOCK_WORDS)
    blocks = total // run * blocks_a_run
    out = torch.empty((blocks, 2), dtype=torch.int64)
    words = (tensor.data_ptr(), _BLOCK_WORDS, blocks_a_run, first, run, stride)
    if tensor.dtype is torch.float64:
        patterns = (form.infinity_bits >> 32, form.nan_bits >> 32)
        run_blocks(_float64_lanes_block, blocks, 8 * total, *words, *patterns, out.data_ptr())
    else:
        # Without a format no word is a NaN: nothing exceeds infinity under a mask of no bits.
        patterns = (form.sign_bit - 1, form.infinity_bits, form.nan_bits) if form else (0, 0, 0)
        run_blocks(_lanes_block, blocks, 8 * total, *words, *patterns, out.data_ptr())
    return out.sum(0)  # modulo 2^64
