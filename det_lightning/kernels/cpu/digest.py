"""Launches the digest lanes of `native.digest`."""

import torch

from ...arithmetic.formats import FORMATS
from .machine_code import Kernel
from .threads import run_blocks

_lanes_block = Kernel("digest", "lanes_block")
_float64_lanes_block = Kernel("digest", "float64_lanes_block")

_BLOCK_WORDS = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_LANE_MASK = (1 << 64) - 1


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The lanes of `tensor` in row-major order, on a checked argument."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    name, size = str(flat.dtype).removeprefix("torch."), flat.element_size()
    words = flat.view(_INTEGERS[size])
    if size < 4:
        words = words.to(torch.int32)
        if size == 2:
            words.bitwise_and_(0xFFFF)
    total = words.numel()
    blocks = -(-total // _BLOCK_WORDS)
    out = torch.empty((blocks, 2), dtype=torch.int64)
    form = FORMATS.get(name)
    if name == "float64":
        high_infinity, high_nan = form.infinity_bits >> 32, form.nan_bits >> 32
        run_blocks(
            _float64_lanes_block, blocks, 8 * total,
            words.data_ptr(), total, _BLOCK_WORDS, high_infinity, high_nan, out.data_ptr(),
        )  # fmt: skip
    else:
        mask, infinity, nan = (form.sign_bit - 1, form.infinity_bits, form.nan_bits) if form else (0, 0, 0)
        run_blocks(
            _lanes_block, blocks, 8 * total,
            words.data_ptr(), total, _BLOCK_WORDS, mask, infinity, nan, out.data_ptr(),
        )  # fmt: skip
    first, second = out.sum(dim=0).tolist()
    return first & _LANE_MASK, second & _LANE_MASK
