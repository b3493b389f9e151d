"""Launches the functions of one variable of `native.elementary`, and products with their derivatives."""

from functools import cache

import torch

from ...arithmetic.elementary import FUNCTIONS, special_values
from ...arithmetic.formats import FLOAT32, Format
from .machine_code import Kernel
from .threads import run_blocks
from .views import empty_words, float32_words, from_words

_KERNELS = {name: Kernel("elementary", f"{name}_block") for name in FUNCTIONS}

DOUBT = {name: 1 << 15 if name in ("gelu_derivative", "silu_derivative") else 32 for name in FUNCTIONS}
"""Last places of a float64 around a tie in which the short evaluation is not trusted: twice its error bound.

Up to ten bits of gelu' and silu' may cancel in the short form.
"""

ALWAYS_IN_DOUBT = 1 << 60
"""A `doubt` that sends every element to pairs."""

_STEPS = 12
"""Elementary steps of an element, for the choice of threads."""


@cache
def _specials(name: str, form: Format) -> torch.Tensor:
    return torch.tensor(special_values(name, form), dtype=torch.int64).to(torch.int32)


def _run(name: str, x: torch.Tensor, g: torch.Tensor | None, form: Format, doubt: int) -> torch.Tensor:
    x = float32_words(x)
    out = empty_words(x.shape, form)
    # Held here: of two threads that ask at first at once, one gets a table that the cache does not keep.
    specials = _specials(name, form if g is None else FLOAT32)
    run_blocks(
        _KERNELS[name], x.numel(), _STEPS * x.numel(),
        x.data_ptr(), 0 if g is None else g.data_ptr(), out.data_ptr(),
        specials.data_ptr(), doubt, form.significand_bits, form.exponent_bits,
    )  # fmt: skip
    return from_words(out, form)


def elementwise(name: str, x: torch.Tensor, form: Format = FLOAT32, *, doubt: int | None = None) -> torch.Tensor:
    """The function `name` of every element of a checked float tensor `x`, in `form`. `doubt` changes the time only."""
    return _run(name, x, None, form, DOUBT[name] if doubt is None else doubt)


def gradient(name: str, g: torch.Tensor, x: torch.Tensor, form: Format) -> torch.Tensor:
    """round(g * d) in `form`, d the nearest float32 to the function `name`, a derivative, at `x`; of the shape of x."""
    return _run(name, x, float32_words(g.expand(x.shape)), form, DOUBT[name])
