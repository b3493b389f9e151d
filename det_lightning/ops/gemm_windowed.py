"""Exact products added into windowed digits: what accumulates a gradient over micro-batches in a few words an element."""

import torch

from ..arithmetic.formats import DIGITS, NB
from ..arithmetic.windowed_digits import LOWEST_BASE, MAXIMUM_STATES, words_for
from ..errors import DetError, InputError
from ..kernels.dispatch import kernels_of
from .exponent_bands import bands_of_exponents
from .gemm import check_operands, det_gemm_partial
from .windowed_digits import WindowedDigits

_ELEMENTS_AT_ONCE = 1 << 20
"""Whose full digits are in memory together: 168 MiB."""

_MARGIN_BITS = 8
"""That a window reaches further down than it must, where it grows: the next product may have smaller terms."""

_MANY = 16
"""If more than this part of a product is left out, it is made from bands of exponents; else it is added one by one."""


def gemm_windowed(x: torch.Tensor, w: torch.Tensor) -> WindowedDigits:
    """The exact product x @ w.T as windowed digits of shape [M, N], a base a row of x.

    x: [M, K], w: [N, K]; float32, bfloat16 or float16, any strides. The window is chosen from the operands; it holds every
    element exactly. Raises InputError as `det_gemm`.
    """
    check_operands("gemm_windowed", x, w, "auto")
    shape = (x.shape[0], w.shape[0])
    if 0 in (*shape, x.shape[1]):
        return WindowedDigits.zeros(shape, torch.zeros(shape[0], dtype=torch.int64, device=x.device), 1)
    if not x.is_cuda:
        return _product_of_digits(x.detach(), w.detach())
    kernels = kernels_of("gemm_windowed")
    count = kernels.words_for_product(x, w)
    base = torch.empty(shape[0], dtype=torch.int64, device=x.device)
    words = torch.empty((count, *shape), dtype=torch.int32, device=x.device)
    left = kernels.add(x, w, words, base, True)
    result = WindowedDigits.of_parts(base, words)
    return result if left is None else _add_left(result, x, w, left, fresh=True)


def add_gemm_windowed(target: WindowedDigits, x: torch.Tensor, w: torch.Tensor) -> WindowedDigits:
    """target += x @ w.T, exactly and in place; returns `target`, which grows where a value does not fit its window.

    x: [M, K], w: [N, K]; float32, bfloat16 or float16, any strides; target: of shape [M, N] on their device. On CUDA the
    words are added to by the kernel that rebuilds the product, which tells apart what does not fit: that alone is added
    anew after the window has grown. Raises InputError as `det_gemm`, and for another shape or device.
    """
    check_operands("add_gemm_windowed", x, w, "auto")
    if tuple(target.shape) != (x.shape[0], w.shape[0]) or target.words.device != x.device:
        raise InputError(
            f"add_gemm_windowed: target is {list(target.shape)} on {target.words.device}; for x {list(x.shape)} and w "
            f"{list(w.shape)} on {x.device} it must be {[x.shape[0], w.shape[0]]} there"
        )
    if 0 in (*target.shape, x.shape[1]):
        return target
    if not x.is_cuda:
        return target.add_(_product_of_digits(x.detach(), w.detach()))
    if target.states >= MAXIMUM_STATES:
        target.normalise_()
    left = kernels_of("gemm_windowed").add(x, w, target.words, target.base, False)
    target.states += 1
    return target if left is None else _add_left(target, x, w, left, fresh=False)


def _add_left(
    target: WindowedDigits, x: torch.Tensor, w: torch.Tensor, elements: torch.Tensor, fresh: bool
) -> WindowedDigits:
    """Adds the elements of x @ w.T that were left out of `target`; returns it, or another in its place if it is `fresh`.

    They do not fit its window, or have too many terms of which something was cut.
    """
    x, w = x.detach(), w.detach()
    total = target.shape.numel()
    if elements.numel() <= total // _MANY:
        _add_elements(target, elements, kernels_of("gemm_windowed").digits_of(elements, x, w))
        return target
    if fresh:
        return _product_in_parts(x, w)
    product = gemm_windowed(x, w)
    if elements.numel() < total:
        chosen = torch.zeros(tuple(target.shape), dtype=torch.bool, device=x.device)
        chosen.view(-1)[elements] = True
        product.words *= chosen
        if product.specials is not None:
            product.specials *= chosen.unsqueeze(-1)
    return target.add_(product)


def _product_in_parts(x: torch.Tensor, w: torch.Tensor) -> WindowedDigits:
    """x @ w.T of operands that no window suits: from bands of exponents, or by way of full digits."""
    bands = bands_of_exponents(x, w)
    if bands is None:
        return _product_of_digits(x, w)
    total: WindowedDigits | None = None
    for x_band, w_band in bands:
        product = gemm_windowed(x_band, w_band)
        total = product if total is None else total.add_(product)
    return total


def _product_of_digits(x: torch.Tensor, w: torch.Tensor) -> WindowedDigits:
    """x @ w.T by way of full digits, of some rows at a time, in the smallest window."""
    rows = max(1, _ELEMENTS_AT_ONCE // w.shape[0])
    firsts = range(0, x.shape[0], rows)
    blocks = [WindowedDigits.from_digits(det_gemm_partial(x[first : first + rows], w)) for first in firsts]
    if len(blocks) == 1:
        return blocks[0]
    count = max(block.words.shape[0] for block in blocks)
    shape = (x.shape[0], w.shape[0])
    product = WindowedDigits.zeros(shape, torch.cat([block.base for block in blocks]), count)
    if any(block.specials is not None for block in blocks):
        product.specials = torch.zeros((*shape, NB - DIGITS), dtype=torch.int64, device=x.device)
    for first, block in zip(firsts, blocks, strict=True):
        product.words[: block.words.shape[0], first : first + rows] = block.words
        if block.specials is not None:
            product.specials[first : first + rows] = block.specials
    return product


def _add_elements(target: WindowedDigits, elements: torch.Tensor, digits: torch.Tensor) -> None:
    """target.flatten()[elements] += the values of digits int64 [n, NB], after it has grown to hold them.

    Elements are distinct, and were not added to since `target.states` counted the state that they are part of.
    """
    kernels = kernels_of("windowed_digits")
    rows = elements // target.shape[1]
    words = torch.empty((target.words.shape[0], elements.numel()), dtype=torch.int32, device=digits.device)
    if not kernels.from_states(digits, target.base[rows], words):
        low, high = kernels.bounds(digits, digits.shape[0])
        there = low <= high
        lower = (low - _MARGIN_BITS * (low < target.base[rows])).clamp(min=LOWEST_BASE)
        base = target.base.scatter_reduce(0, rows[there], lower[there], "amin")
        widest = int((high - base[rows])[there].max())
        target.grow_(base, max(target.words.shape[0], words_for(0, widest)))
        words = torch.empty((target.words.shape[0], elements.numel()), dtype=torch.int32, device=digits.device)
        if not kernels.from_states(digits, target.base[rows], words):
            raise DetError(
                "add_gemm_windowed: a window that was made for some values does not hold them; please report this"
            )
    if target.states > MAXIMUM_STATES - 1:
        target.normalise_()
    target.planes()[: words.shape[0]].index_add_(1, elements, words)
    target.states += 1
    counts = digits[:, DIGITS:]
    if bool(counts.any()):
        if target.specials is None:
            target.specials = torch.zeros((*target.shape, NB - DIGITS), dtype=torch.int64, device=digits.device)
        target.specials.view(-1, NB - DIGITS).index_add_(0, elements, counts)
