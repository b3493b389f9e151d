"""Tensors as integers in memory, and back: floats enter and leave kernels as bit patterns."""

import torch

from ...arithmetic.formats import Format

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def float32_words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 tensor of the same values; itself if it is one. bfloat16 and float16 convert exactly.

    Keep the result alive while a kernel reads it at `.data_ptr()`.
    """
    if tensor.dtype is not torch.float32:
        tensor = tensor.detach().to(torch.float32)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def float32_rows(matrix: torch.Tensor) -> torch.Tensor:
    """A float32 matrix of the same values whose rows are contiguous, `stride(0)` elements apart; itself if it is one.

    Keep the result alive while a kernel reads it.
    """
    usable = matrix.dtype is torch.float32 and not matrix.is_neg() and (matrix.stride(1) == 1 or matrix.shape[1] <= 1)
    return matrix if usable else float32_words(matrix)


def empty_words(shape: tuple[int, ...], form: Format) -> torch.Tensor:
    """Memory for one int32 pattern of `form` an element, to be filled by a kernel and read by `from_words`."""
    return torch.empty(shape, dtype=torch.float32 if form.bits == 32 else torch.int32)


def from_words(words: torch.Tensor, form: Format) -> torch.Tensor:
    """The float tensor whose patterns a kernel has written into `words`."""
    return words if form.bits == 32 else words.to(torch.int16).view(DTYPES[form.name])
