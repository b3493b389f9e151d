"""Launches the digest lanes of `cuda_src/tensor_digest.cu`. The twin of `cpu.digest`."""

import torch

from .cuda import FORMAT_CODES, launch, multiprocessors

_THREADS = 256
_FOURS = 32
"""Fours of elements that a thread takes before its block moves on."""

_MOST_BLOCKS = 1 << 20
_LANE_MASK = (1 << 64) - 1
_FLOAT64_CODE = 3
_WIDTH_CODES = {1: 4, 2: 5, 4: 6, 8: 7}


def lanes_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The lanes of `tensor` in row-major order as int64 [2] on its device, without waiting for it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_neg().contiguous()
    code = _FLOAT64_CODE if tensor.dtype is torch.float64 else FORMAT_CODES.get(tensor.dtype)
    if code is None:
        code = _WIDTH_CODES[tensor.element_size()]
    lanes = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if tensor.numel():
        blocks = -(-tensor.numel() // (4 * _FOURS * _THREADS))
        if blocks < 4 * multiprocessors(tensor.device.index):
            blocks = min(-(-tensor.numel() // (4 * _THREADS)), 4 * multiprocessors(tensor.device.index))
        launch(
            tensor.device, "tensor_digest", "tensor_digest", (min(blocks, _MOST_BLOCKS),), _THREADS,
            tensor.data_ptr(), code, tensor.numel(), 0, lanes.data_ptr(),
        )  # fmt: skip
    return lanes


def tensor_lanes(tensor: torch.Tensor) -> tuple[int, int]:
    """The lanes of `tensor` in row-major order, on a checked argument."""
    first, second = lanes_tensor(tensor).tolist()
    return first & _LANE_MASK, second & _LANE_MASK
