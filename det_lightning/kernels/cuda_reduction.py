"""Launches the exact sums of `cuda_src/reduction.cu` and the kernels on whole arrays of states (`digits.cu`).

The twin of `cpu.reduction`: the same functions, the same bits.
"""

import torch

from ..arithmetic.formats import NB, Format
from .cuda import DTYPES, FORMAT_CODES, Call, launch, launch_all, multiprocessors, plain

_KERNELS = {"sum": "sum_partial", "squares": "sum_of_squares_partial", "products": "sum_of_products_partial"}
_THREADS = 256
_TERMS = 16
_BLOCKS_A_MULTIPROCESSOR = 5
_SHORT, _MANY = 256, 4096
"""More than _MANY sums of at most _SHORT contiguous terms are taken as columns of the transpose."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _sum(kind: str, x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    """Canonical states [outer * inner, NB] of sums over the middle axis of x, or of x * w."""
    outer, n, inner = x.shape
    x = plain(x).contiguous()
    w = x if w is None else plain(w).contiguous()
    states = torch.zeros((outer * inner, NB), dtype=torch.int64, device=x.device)
    if inner == 1 and n <= _SHORT and outer > _MANY:
        same = w is x
        x = x.view(outer, n).t().contiguous()
        w = x if same else w.view(outer, n).t().contiguous()
        outer, inner = 1, outer
    if x.numel():
        if inner == 1:
            blocks, terms_a_block = outer, _TERMS * _THREADS
        else:
            blocks, terms_a_block = outer * _ceil(inner, _THREADS), _TERMS * (_THREADS // min(inner, _THREADS))
        most = max(1, _BLOCKS_A_MULTIPROCESSOR * multiprocessors(x.device.index) // blocks)
        chunks = min(most, _ceil(n, terms_a_block))
        defines = (("X_FORMAT", FORMAT_CODES[x.dtype]), ("W_FORMAT", FORMAT_CODES[w.dtype]))
        arguments = (x.data_ptr(), w.data_ptr(), states.data_ptr(), n, inner)
        launch_all(x.device, (Call("reduction", _KERNELS[kind], (blocks, chunks), _THREADS, arguments, defines),))
    return normalise(states)


def row_states(kind: str, x: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
    """Canonical states [rows, NB] of the sums over k of x[i, k] ("sum"), x[i, k]^2 ("squares") or x[i, k] * w[i, k]
    ("products"); x, w: [rows, n]."""
    return _sum(kind, x.unsqueeze(2), None if w is None else w.unsqueeze(2))


def sum_states(x: torch.Tensor) -> torch.Tensor:
    """Canonical states [outer, inner, NB] of the sums over the middle axis of `x` [outer, n, inner]."""
    return _sum("sum", x).view(x.shape[0], x.shape[2], NB)


def sum_of_squares_state(x: torch.Tensor) -> torch.Tensor:
    """The canonical state [NB] of the sum of squares of all elements."""
    return _sum("squares", x.reshape(1, -1, 1)).view(NB)


def normalise(states: torch.Tensor) -> torch.Tensor:
    """Make a contiguous tensor of states canonical in place, and return it."""
    count = states.numel() // NB
    if count:
        launch(states.device, "digits", "digits_normalise", (_ceil(count, 128),), 128, states.data_ptr(), count)
    return states


def finalize(states: torch.Tensor, form: Format, denominator: int) -> torch.Tensor:
    """The rounded values of a contiguous tensor of states [..., NB]. Requires: 0 <= denominator < 2^63."""
    out = torch.empty(states.shape[:-1], dtype=DTYPES[form], device=states.device)
    if out.numel():
        launch(
            states.device, "digits", "digits_finalize", (_ceil(out.numel(), 128),), 128,
            states.data_ptr(), denominator, out.data_ptr(), FORMAT_CODES[out.dtype], out.numel(),
        )  # fmt: skip
    return out
