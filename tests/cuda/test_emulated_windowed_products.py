"""Products added into windowed digits by the emulated kernels: what fits the window, and what is left to the caller."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32  # noqa: E402
from det_lightning.arithmetic.windowed_digits import HIGHEST_BASE, LOWEST_BASE  # noqa: E402
from det_lightning.kernels import cuda_gemm_windowed  # noqa: E402
from det_lightning.kernels.cpu import reduction  # noqa: E402
from det_lightning.ops.gemm import det_gemm_partial  # noqa: E402
from det_lightning.ops.gemm_windowed import _add_elements  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402

from . import emulator as emulation  # noqa: E402
from .conftest import check_guards, guarded  # noqa: E402
from .test_products_on_gpu import any_finite, normal, numbers, outliers, subnormal, with_specials  # noqa: E402

PROGRAM = """
#include "call.h"
#include "gemm.cu"
extern "C" void launch_elements(unsigned columns, unsigned count, const long long* values) {
    grid::call(gemm_elements, columns, 1, count, values);
}
"""


@pytest.fixture(scope="module")
def elements(emulator, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elements")
    emulation.Emulator(folder)  # writes the sources
    return emulation.build(PROGRAM, folder / "gemm.so")


@pytest.fixture
def add(emulated_product, elements, monkeypatch):
    """(target or None, x, w, engine) -> (target += x @ w.T, how many elements did not fit)."""

    def launch(device, source, kernel, blocks, threads, *arguments):
        assert (source, kernel) == ("gemm", "gemm_elements") and blocks[0] > 0
        elements.launch_elements(blocks[0], threads, (ctypes.c_longlong * len(arguments))(*arguments))
        emulation.check_faults(elements, kernel)

    monkeypatch.setattr(cuda_gemm_windowed, "launch", launch)
    monkeypatch.setattr(cuda_gemm_windowed._known, "prepared", {})

    def added(target, x, w, engine="int8", count=5):
        fresh, rows, columns = target is None, x.shape[0], w.shape[0]
        if fresh:
            words, around = guarded(4 * count * rows * columns)
            base, around_base = guarded(8 * rows)
            words, base = words.view(torch.int32).view(count, rows, columns), base.view(torch.int64)
        else:
            words, base = target.words, target.base
        left = cuda_gemm_windowed.add(x, w, words, base, fresh, 12, engine)
        if fresh:
            check_guards(around, around_base)
            target = WindowedDigits(base, words)
        else:
            target.states += 1
        if left is not None:
            _add_elements(target, left, cuda_gemm_windowed.digits_of(left, x, w))
        return target, 0 if left is None else len(left)

    return added


@pytest.mark.parametrize("disorder", [0, 2])
@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_what_does_not_fit_is_left_and_nothing_is_lost(add, monkeypatch, engine, disorder):
    monkeypatch.setattr(emulation.EmulatedChain, "disorder", disorder)
    some_fit = False
    for seed, (data, form, columns) in enumerate(
        [(normal, FLOAT32, 9), (outliers, FLOAT32, 10), (any_finite, FLOAT16, 9), (with_specials, BFLOAT16, 34),
         (subnormal, FLOAT32, 10)]
    ):  # fmt: skip
        rng = numbers(150 + seed)
        x, w = data(rng, form, (18, 37)), data(rng, form, (columns, 37))
        target, left = add(None, x, w, engine)
        assert torch.equal(target.to_digits(), det_gemm_partial(x, w))
        some_fit |= left == 0
        # More is added to it, from rows of other sizes and of another format.
        y, other = any_finite(rng, FLOAT32, (18, 5)), normal(rng, BFLOAT16, (columns, 5))
        wanted = reduction.normalise(det_gemm_partial(x, w) + det_gemm_partial(y, other))
        target, left = add(target, y, other, engine)
        assert left > 0 and torch.equal(target.to_digits(), wanted)
    assert some_fit


@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_sums_as_large_as_the_moduli_allow(add, engine):
    """Rows of equal terms have the largest sum for their norm: some of these come within 2 % of the bound."""
    sizes = 2.0 ** (torch.arange(48) / 24)
    x = torch.cat([sizes, -sizes])[:, None].expand(-1, 64).contiguous().float()
    for w in (x[:48], 3 * x[:48].flip(0)):
        target, left = add(None, x, w, engine)
        assert left == 0 and torch.equal(target.to_digits(), det_gemm_partial(x, w))


@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_rests_in_many_rows_and_columns(add, engine):
    """Terms far below the others, up to six a row and more, beside rows without any and rows with an infinity."""
    rng = numbers(170)
    x, w = normal(rng, FLOAT32, (50, 40)), normal(rng, FLOAT32, (70, 40))
    for tensor, every in ((x, 3), (w, 2)):
        for row in range(0, len(tensor), every):
            terms = rng.choice(40, size=int(rng.integers(1, 8)), replace=False)
            tensor[row, terms] *= 2.0 ** -torch.from_numpy(rng.integers(15, 24, size=len(terms))).float()
    x[7, 3], w[9, 30] = float("inf"), float("nan")
    target, left = add(None, x, w, engine)
    assert 70 + 49 <= left < 50 * 70 / 2 and torch.equal(target.to_digits(), det_gemm_partial(x, w))
    wanted = reduction.normalise(2 * det_gemm_partial(x, w))
    assert torch.equal(add(target, x, w, engine)[0].to_digits(), wanted)


@pytest.mark.parametrize("engine", ["float64", "int8"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 30, 1), (2, 1, 33), (33, 17, 2)], ids=str)
def test_sizes_of_one_and_rows_in_parts(add, monkeypatch, shape, engine):
    monkeypatch.setattr(cuda_gemm_windowed, "rows_at_once", lambda *_: 16)
    m, k, n = shape
    x, w = normal(numbers(160), FLOAT32, (m, k)), any_finite(numbers(161), FLOAT32, (n, k))
    for a, b in ((x, w), (x.t().contiguous().t(), torch._neg_view(w)), (torch.zeros_like(x), w)):
        target, _ = add(None, a, b, engine)
        assert torch.equal(target.to_digits(), det_gemm_partial(a, b))


@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_windows_of_any_width_and_place_in_a_larger_buffer(add, engine):
    """From even and odd places on, planes at even and odd distances; bases from far below the product's to far above it."""
    rng, size = numbers(180), 19 * 34
    x, w = normal(rng, FLOAT32, (19, 21)), normal(rng, BFLOAT16, (34, 21))
    w[3, 7] *= 2.0**-30
    wanted = det_gemm_partial(x, w)
    assert torch.equal(add(None, x, w, engine, count=8)[0].to_digits(), wanted)
    for count, first, gap in ((1, 1, 0), (2, 0, 1), (4, 0, 0), (5, 1, 2), (7, 0, 3), (8, 0, 2)):
        buffer = torch.full((first + count * (size + gap),), 77, dtype=torch.int32)
        planes = buffer[first:].view(count, size + gap)
        words = planes[:, :size].view(count, 19, 34)
        words.zero_()
        base = torch.from_numpy(rng.integers(-170, 20, 19))
        base[:2] = torch.tensor([LOWEST_BASE, HIGHEST_BASE])
        target, left = add(WindowedDigits(base, words), x, w, engine)
        assert left >= 34 and (left < size or count == 1)
        assert torch.equal(target.to_digits(), wanted)
        assert bool((buffer[:first] == 77).all() and (planes[:, size:] == 77).all())
