"""A tempting impostor: sums in float64, rounded to float32 at the end. Right on ordinary data, wrong where terms cancel."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from det_lightning.demo.network import first_weights
from det_lightning.ops.reduction import add_sum_digits


def _float64_gemm(x, w, bias=None, *, dtype=torch.float32):
    total = x.double() @ w.double().t()
    return (total if bias is None else total + bias.double()).to(dtype or torch.float32)


def _add_float64(digits: torch.Tensor, total: torch.Tensor) -> None:
    """Adds a float64 value as three float32 parts, so that nothing but the float64 sum itself is inexact."""
    for _ in range(3):
        part = total.float()
        add_sum_digits(digits, part.unsqueeze(0), dim=0)
        total = total - part.double()


def _add_gemm(digits, x, w):
    _add_float64(digits, x.double() @ w.double().t())


def _add_sum(digits, x, dim):
    _add_float64(digits, x.double().sum(dim))


@contextmanager
def float64_sums() -> Iterator[None]:
    """While open, products and gradient sums of this process are float64 sums."""
    replaced = {
        "det_lightning.ops.linear.det_gemm": _float64_gemm,
        "det_lightning.ops.linear.add_gemm_digits": _add_gemm,
        "det_lightning.distributed.bucket_sum.add_gemm_digits": _add_gemm,
        "det_lightning.ops.linear.add_sum_digits": _add_sum,
        "det_lightning.demo.network.det_gemm": _float64_gemm,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch(name, function))
        yield


def wrong_first_weights() -> tuple[int, int]:
    """(how many of the network's first weights the float64 sum gets wrong, how many there are)."""
    shapes = ((32, 64), (10, 32))
    exact = [first_weights(*shape, place) for place, shape in enumerate(shapes)]
    with float64_sums():
        guessed = [first_weights(*shape, place) for place, shape in enumerate(shapes)]
    wrong = 0
    for ours, theirs in zip(exact, guessed, strict=True):
        wrong += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
    return wrong, sum(each.numel() for each in exact)
