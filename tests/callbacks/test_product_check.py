"""What the watcher of products finds, called as the kernels are called: single products, batches, special values."""

import pytest
import torch
from det_lightning.callbacks.product_check import GRADIENT_DIGITS, PRODUCT, ProductCheck

from det_lightning.arithmetic.formats import FLOAT32, NB
from det_lightning.kernels.cpu import gemm as kernels
from det_lightning.ops.gemm_windowed import add_gemm_windowed
from det_lightning.ops.windowed_digits import WindowedDigits

GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR)


def batched(x, w, bias, form, engine):
    """As on CUDA: a batch in one call."""
    if x.dim() == 2:
        return kernels.gemm(x, w, bias, form, engine)
    return torch.stack([kernels.gemm(one, other, bias, form, engine) for one, other in zip(x, w, strict=True)])


def faulty(kernel, place, times):
    """The kernel with the lowest bit of one result flipped at its first calls."""
    left = [times]

    def wrong(*arguments, **options):
        result = kernel(*arguments, **options)
        left[0] -= 1
        if left[0] >= 0:
            target = arguments[0] if result is None else result
            target.view({4: torch.int32, 8: torch.int64}[target.element_size()])[place] ^= 1
        return result

    return wrong


@pytest.mark.parametrize("shapes", [((6, 9), (5, 9)), ((4, 6, 9), (4, 5, 9))], ids=["one", "batch"])
@pytest.mark.parametrize("rows", [1, 3, None])
def test_right_products_are_not_accused(shapes, rows):
    found = []
    check = ProductCheck(rows, found.append)
    x, w = normal(*shapes[0]), normal(*shapes[1])
    result = check("gemm.gemm", batched, (x, w, None, FLOAT32, "auto"), {})
    assert torch.equal(result, batched(x, w, None, FLOAT32, "auto")) and (found, check.checked) == ([], 1)


@pytest.mark.parametrize(
    ("shapes", "place"), [(((6, 9), (5, 9)), (4, 2)), (((4, 6, 9), (4, 5, 9)), (3, 5, 1))], ids=["one", "batch"]
)
@pytest.mark.parametrize(("times", "persistent"), [(1, False), (9, True)])
def test_a_wrong_result_is_reported_with_a_verdict(shapes, place, times, persistent):
    found = []
    x, w = normal(*shapes[0]), normal(*shapes[1])
    ProductCheck(None, found.append)("gemm.gemm", faulty(batched, place, times), (x, w, None, FLOAT32, "auto"), {})
    ((kind, operand, verdict),) = found
    assert (kind, operand is w, verdict) == (PRODUCT, True, persistent)


@pytest.mark.parametrize("special", [None, float("inf"), float("nan")])
@pytest.mark.parametrize(("times", "persistent"), [(0, None), (1, False), (9, True)])
def test_wrong_digits_are_reported_beside_infinities_and_nans_too(special, times, persistent):
    found, (x, w) = [], (normal(6, 9), normal(5, 9))
    if special is not None:
        x[2, 3] = special
    digits = torch.zeros((6, 5, NB), dtype=torch.int64)
    kernel = faulty(kernels.add_gemm_digits, (-1, 2, 7), times)  # also of the rows that are computed again
    ProductCheck(None, found.append)("gemm.add_gemm_digits", kernel, (digits, x, w, "auto"), {})
    assert [(kind, verdict) for kind, _, verdict in found] == ([] if times == 0 else [(GRADIENT_DIGITS, persistent)])


def windowed(x, w, words, base, fresh):
    """As the kernel of a GPU; what does not fit is left out where it is said to be."""
    target = WindowedDigits.of_parts(base, words)
    assert add_gemm_windowed(target, x, w).words is words, "the window holds everything"


@pytest.mark.parametrize("special", [None, float("inf")])
@pytest.mark.parametrize(("times", "persistent"), [(0, None), (1, False), (9, True)])
def test_wrong_words_are_reported_with_what_was_left_out_and_without(special, times, persistent):
    found, (x, w) = [], (normal(6, 9), normal(5, 9))
    words, base = torch.zeros((20, 6, 5), dtype=torch.int32), torch.full((6,), -298)
    windowed(x, w, words, base, False)
    if special is not None:
        x[2, 3] = special
    left = [times]

    def kernel(x, w, words, base, fresh):
        finite = torch.isfinite(x).all(dim=1)
        windowed(torch.where(finite[:, None], x, 0), w, words, base, fresh)
        left[0] -= 1
        if left[0] >= 0:
            words[3, -1, 2] ^= 1
        return None if bool(finite.all()) else torch.arange(10, 15)

    ProductCheck(None, found.append)("gemm_windowed.add", kernel, (x, w, words, base, False), {})
    assert [(kind, verdict) for kind, _, verdict in found] == ([] if times == 0 else [(GRADIENT_DIGITS, persistent)])


def test_other_kernels_and_empty_products_pass():
    check = ProductCheck(None, lambda wrong: pytest.fail(str(wrong)))
    assert check("reduction.finalize", lambda value: value + 1, (4,), {}) == 5
    digits = torch.zeros((0, 5, NB), dtype=torch.int64)
    check("gemm.add_gemm_digits", kernels.add_gemm_digits, (digits, normal(0, 9), normal(5, 9), "auto"), {})
    assert check("gemm.gemm", batched, (normal(0, 9), normal(5, 9), None, FLOAT32, "auto"), {}).shape == (0, 5)
