"""Launches the functions of one variable of `cuda_src/elementary.cu`. The twin of `cpu.elementary`."""

from functools import cache

import torch

from ..arithmetic.elementary import FUNCTIONS, special_values
from ..arithmetic.formats import FLOAT32, Format
from .cuda import DTYPES, FORMAT_CODES, Call, launch_all, multiprocessors, plain

CODES = {name: code for code, name in enumerate(FUNCTIONS)}
"""What the kernel calls a function."""

_THREADS = 256
_BLOCKS_A_MULTIPROCESSOR = 8
_NO_GRADIENT = 3


@cache
def _specials(name: str, form: Format) -> tuple[int, int, int]:
    """The table of special values as the kernel takes it: two to a 64-bit word, signed."""
    bits = special_values(name, form)
    words = (low | high << 32 for low, high in zip(bits[::2], bits[1::2], strict=True))
    return tuple(word - (1 << 64) if word >> 63 else word for word in words)


def _launch(name: str, x: torch.Tensor, g: torch.Tensor | None, form: Format, only_pairs: bool) -> torch.Tensor:
    x = plain(x).contiguous()
    out = torch.empty(x.shape, dtype=DTYPES[form], device=x.device)
    if not x.numel():
        return out
    blocks = min(-(-x.numel() // (4 * _THREADS)), _BLOCKS_A_MULTIPROCESSOR * multiprocessors(x.device.index))
    defines = (
        ("FUNCTION", CODES[name]),
        ("IN", FORMAT_CODES[x.dtype]),
        ("OUT", FORMAT_CODES[out.dtype]),
        ("GRADIENT", _NO_GRADIENT if g is None else FORMAT_CODES[g.dtype]),
    )
    arguments = (
        x.data_ptr(), 0 if g is None else g.data_ptr(), out.data_ptr(), x.numel(),
        *_specials(name, form if g is None else FLOAT32), int(only_pairs),
    )  # fmt: skip
    launch_all(x.device, (Call("elementary", "elementary", (blocks,), _THREADS, arguments, defines),))
    return out


def elementwise(name: str, x: torch.Tensor, form: Format = FLOAT32, *, only_pairs: bool = False) -> torch.Tensor:
    """The function `name` of every element of a checked float tensor `x`, in `form`. `only_pairs` changes the time only."""
    return _launch(name, x, None, form, only_pairs)


def gradient(name: str, g: torch.Tensor, x: torch.Tensor, form: Format) -> torch.Tensor:
    """round(g * d) in `form`, d the nearest float32 to the function `name`, a derivative, at `x`; of the shape of x."""
    return _launch(name, x, plain(g.expand(x.shape)).contiguous(), form, False)
