"""Launches `cuda_src/digest_batch.cu`: the digest lanes of many tensors at once. The twin of `cpu.digest_batch`."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from .cuda import FORMAT_CODES, launch
from .digest_place import Place

_THREADS = 256
_BLOCK_ELEMENTS = 4 * 32 * _THREADS
"""What a block digests: 32 fours of elements a thread."""

_FLOAT64_CODE = 3
_WIDTH_CODES = {1: 4, 2: 5, 4: 6, 8: 7}
_CODES = {**FORMAT_CODES, torch.float64: _FLOAT64_CODE}
_MOST_TABLES = 64

_tables: OrderedDict[tuple, torch.Tensor] = OrderedDict()
"""Tables that lie on a device: weights and optimizer state stay where they are from step to step."""


def many_lanes(
    first: torch.Tensor, tensors: Sequence[torch.Tensor], places: Sequence[Place | None] | None
) -> torch.Tensor:
    """The lanes of each tensor as int64 [tensors, 2] on their device, without waiting for it, on checked arguments.

    first: of the tensors. places: of the elements within a larger tensor; None: the tensor is all of it.
    """
    device = first.device
    plain, rows, blocks = [], [], 0
    # Every tensor of every step comes by here: nothing is asked of it twice.
    for tensor, place in zip(tensors, places or [None] * len(tensors), strict=True):
        code = _CODES.get(tensor.dtype)
        if code is None and tensor.is_complex():
            tensor, place = torch.view_as_real(tensor.detach().resolve_conj()), place and place.times(2)
            code = _CODES.get(tensor.dtype)
        if tensor.is_neg() or not tensor.is_contiguous():
            tensor = tensor.detach().resolve_neg().contiguous()
        plain.append(tensor)  # kept until the kernel is queued
        count = tensor.numel()
        blocks += -(-count // _BLOCK_ELEMENTS)
        code = _WIDTH_CODES[tensor.element_size()] if code is None else code
        rows.append((tensor.data_ptr(), code, count, *(place or (0, count or 1, count or 1)), blocks))
    lanes = torch.zeros((len(rows), 2), dtype=torch.int64, device=device)
    if blocks:
        table = _table_on(device, tuple(rows))
        launch(
            device, "digest_batch", "digest_batch", (blocks,), _THREADS,
            table.data_ptr(), len(rows), lanes.data_ptr(),
        )  # fmt: skip
    return lanes


def _table_on(device: torch.device, rows: tuple) -> torch.Tensor:
    """`rows` as int64 on the device, in the order of its current stream."""
    key = device.index, torch.cuda.current_stream(device).cuda_stream, rows
    table = _tables.get(key)
    if table is None:
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
        _tables[key] = table
        if len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return table
