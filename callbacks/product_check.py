"""Watches the matrix products of a step: digits of gradients are verified modulo a prime, of rounded results some rows are
computed again by the slow definition.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from det_lightning.callbacks.product_residues import (
    PRIME,
    project_digits,
    project_product,
    project_words,
    random_vector,
)

from det_lightning.arithmetic.formats import NB
from det_lightning.kernels.dispatch import kernels_of
from det_lightning.ops.windowed_digits import WindowedDigits

PRODUCT, GRADIENT_DIGITS = "product", "gradient digits"
_SLOW = "long_accumulator"


class WrongProduct(NamedTuple):
    """kind: PRODUCT or GRADIENT_DIGITS. operand: one of its factors. persistent: wrong again when computed once more."""

    kind: str
    operand: torch.Tensor
    persistent: bool


class ProductCheck:
    """A kernel watcher (`kernel_watch`) that hands each wrong product to `report`.

    rows: how many rows of a rounded product are computed again, chosen anew each time; None for all.
    """

    def __init__(self, rows: int | None, report: Callable[[WrongProduct], None]):
        self._rows, self._report = rows, report
        self._choose, self._vectors = (
            random.Random(0),
            torch.Generator().manual_seed(0),
        )  # the training draws nothing from it
        self.checked = 0

    def __call__(self, name: str, kernel: Callable, arguments: tuple, options: dict) -> Any:
        if name == "gemm.gemm":
            return self._rounded(kernel, arguments, options)
        if name == "gemm.add_gemm_digits":
            return self._digits(kernel, arguments, options)
        if name == "gemm_windowed.add":
            return self._windowed(kernel, arguments, options)
        return kernel(*arguments, **options)

    def _rounded(self, kernel: Callable, arguments: tuple, options: dict) -> torch.Tensor:
        x, w, bias, form = arguments[:4]
        result = kernel(*arguments, **options)
        self.checked += 1
        # A batch is one product for each index of the first dimension.
        for place in [()] if x.dim() == 2 else [(each,) for each in self._chosen(x.shape[0])]:
            rows = self._chosen(x.shape[-2])
            expected = kernels_of("gemm").gemm(x[place][rows], w[place], bias, form, _SLOW)
            if not _same(result[place][rows], expected):
                again = kernel(*arguments, **options)
                self._report(WrongProduct(PRODUCT, w, not _same(again[place][rows], expected)))
        return result

    def _digits(self, kernel: Callable, arguments: tuple, options: dict) -> Any:
        digits, x, w, engine = arguments[:4]
        if 0 in digits.shape or not (bool(torch.isfinite(x).all()) and bool(torch.isfinite(w).all())):
            return self._rows_of_digits(kernel, arguments, options)
        self.checked += 1
        vector = random_vector(w.shape[0], self._vectors, digits.device)
        before = project_digits(digits, vector)
        result = kernel(*arguments, **options)
        added = project_product(x, w, vector)
        wrong = project_digits(digits, vector) != (before + added) % PRIME
        if bool(wrong.any()):
            rows = wrong.nonzero().flatten()
            again = torch.zeros_like(digits[rows])
            kernel(again, x[rows], w, engine)
            persistent = not torch.equal(project_digits(again, vector), added[rows])
            self._report(WrongProduct(GRADIENT_DIGITS, w, persistent))
        return result

    def _rows_of_digits(self, kernel: Callable, arguments: tuple, options: dict) -> Any:
        """Infinities and NaNs are counted beside the digits, which no residue sees: rows of them by the definition."""
        digits, x, w, engine = arguments[:4]
        self.checked += 1
        rows = torch.tensor(self._chosen(x.shape[0]), dtype=torch.int64, device=digits.device)
        before = digits[rows].clone()
        result = kernel(*arguments, **options)
        expected = before.clone()
        kernels_of("gemm").add_gemm_digits(expected, x[rows], w, _SLOW)
        if not _same(_canonical(digits[rows]), _canonical(expected)):
            again = before.clone()
            kernel(again, x[rows], w, engine)
            self._report(WrongProduct(GRADIENT_DIGITS, w, not _same(_canonical(again), _canonical(expected))))
        return result

    def _windowed(self, kernel: Callable, arguments: tuple, options: dict) -> torch.Tensor | None:
        """A product into words. The elements that it left out come by way of full digits, or one by one."""
        x, w, words, base, fresh = arguments[:5]
        before = torch.zeros_like(words) if fresh else words.clone()
        left = kernel(*arguments, **options)
        self.checked += 1
        if left is None and bool(torch.isfinite(x).all()) and bool(torch.isfinite(w).all()):
            vector = random_vector(w.shape[0], self._vectors, words.device)
            added = project_product(x, w, vector)
            wanted = (project_words(before, base, vector) + added) % PRIME
            wrong = (project_words(words, base, vector) != wanted).nonzero().flatten()
        else:
            rows = torch.tensor(self._chosen(x.shape[0]), dtype=torch.int64, device=words.device)
            taken = _all_but(left, words)[rows]
            wrong = rows[_wrong_rows(words[:, rows] - before[:, rows], base[rows], x[rows], w, taken)]
        if len(wrong):
            again = torch.zeros_like(words[:, wrong])
            left = kernel(x[wrong], w, again, base[wrong], False, *arguments[5:], **options)
            persistent = bool(_wrong_rows(again, base[wrong], x[wrong], w, _all_but(left, again)).any())
            self._report(WrongProduct(GRADIENT_DIGITS, w, persistent))
        return left

    def _chosen(self, count: int) -> list[int]:
        if self._rows is None or self._rows >= count:
            return list(range(count))
        return sorted(self._choose.sample(range(count), self._rows))


def _all_but(left: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor:
    """bool [M, N]: the elements of words [count, M, N] that were not left out."""
    taken = torch.ones(words.shape[1:], dtype=torch.bool, device=words.device)
    if left is not None:
        taken.view(-1)[left] = False
    return taken


def _wrong_rows(
    words: torch.Tensor, base: torch.Tensor, x: torch.Tensor, w: torch.Tensor, taken: torch.Tensor
) -> torch.Tensor:
    """bool [M]: whether words [count, M, N] are not the product by its definition, in the elements `taken`."""
    expected = torch.zeros((*taken.shape, NB), dtype=torch.int64, device=words.device)
    kernels_of("gemm").add_gemm_digits(expected, x, w, _SLOW)
    found = WindowedDigits(base, words.contiguous()).to_digits()
    unlike = (_canonical(expected) != found).any(dim=-1)
    return (unlike & taken).any(dim=-1)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits; results of covered kernels hold canonical NaNs only."""
    return torch.equal(_words(one), _words(other))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _canonical(digits: torch.Tensor) -> torch.Tensor:
    return kernels_of("reduction").normalise(digits.clone(memory_format=torch.contiguous_format))
