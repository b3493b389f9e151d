"""Products in windowed digits on the GPU against full digits from the CPU."""

import pytest

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32

torch = pytest.importorskip("torch")

from det_lightning.kernels import cuda_gemm_windowed  # noqa: E402
from det_lightning.ops import gemm_windowed as module  # noqa: E402
from det_lightning.ops.digits import normalise_digits  # noqa: E402
from det_lightning.ops.gemm import det_gemm, det_gemm_partial  # noqa: E402
from det_lightning.ops.gemm_windowed import add_gemm_windowed, gemm_windowed  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402

from .conftest import DEVICE, to_bits  # noqa: E402
from .test_products_on_gpu import DATA, any_finite, normal, numbers, outliers  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]


@pytest.fixture(params=["int8", "float64"], autouse=True)
def engine(request, monkeypatch):
    """What "auto" is."""
    monkeypatch.setattr(cuda_gemm_windowed, "engine_of", lambda index: request.param)


SHAPES = [(1, 1, 1), (7, 64, 5), (129, 300, 70), (65, 1000, 200), (40, 2500, 33)]


def assert_same(windowed: WindowedDigits, wanted: torch.Tensor) -> None:
    assert torch.equal(windowed.to_digits().cpu(), wanted)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_exact_in_the_window_that_is_chosen_for_it(data, shape):
    rng = numbers(21)
    m, k, n = shape
    x, w = DATA[data](rng, FLOAT32, (m, k)), DATA[data](rng, FLOAT32, (n, k))
    windowed = gemm_windowed(x.to(DEVICE), w.to(DEVICE))
    assert_same(windowed, det_gemm_partial(x, w))
    assert to_bits(windowed.round()).tobytes() == to_bits(det_gemm(x, w)).tobytes()


@pytest.mark.parametrize("moduli", [4, 7, 9, 11, 14, 16])
def test_the_number_of_moduli_cannot_be_seen(monkeypatch, moduli):
    monkeypatch.setattr(cuda_gemm_windowed, "moduli_for", lambda x, w: moduli)
    rng = numbers(22)
    x, w = normal(rng, FLOAT32, (150, 700)), normal(rng, FLOAT32, (130, 700))
    wanted = det_gemm_partial(x, w)
    total = gemm_windowed(x.to(DEVICE), w.to(DEVICE))
    assert_same(total, wanted)
    assert_same(add_gemm_windowed(total, x.to(DEVICE), w.to(DEVICE)), normalise_digits(2 * wanted))


def test_sums_of_products_of_any_ranges_are_exact_and_windows_grow():
    rng = numbers(23)
    total, wanted = None, 0
    for turn, (data, scale) in enumerate(
        ((normal, 0), (normal, 0), (normal, -70), (outliers, 60), (any_finite, 0), (normal, 3), (normal, -30))
    ):
        form = BFLOAT16 if turn == 5 else FLOAT32
        x, w = data(rng, form, (70, 333)), data(rng, form, (50, 333))
        x *= 2.0**scale
        on_device = x.to(DEVICE), w.to(DEVICE)
        total = gemm_windowed(*on_device) if total is None else add_gemm_windowed(total, *on_device)
        wanted = wanted + det_gemm_partial(x, w)
        assert_same(total, normalise_digits(wanted.clone()))


def test_a_window_that_is_too_small_grows_and_nothing_is_cut():
    rng = numbers(24)
    x, w = normal(rng, FLOAT32, (60, 200)), normal(rng, FLOAT32, (40, 200))
    for base, words in ((0, 1), (-20, 2), (-300 + 2, 1), (250, 1)):
        target = WindowedDigits.zeros((60, 40), torch.full((60,), base, device=DEVICE), words)
        assert_same(add_gemm_windowed(target, x.to(DEVICE), w.to(DEVICE)), det_gemm_partial(x, w))


def test_many_products_and_strided_operands():
    rng = numbers(25)
    x, w = normal(rng, FLOAT32, (300, 64)), normal(rng, FLOAT32, (300, 48))
    total = gemm_windowed(x.to(DEVICE).t(), w.to(DEVICE).t())
    for _ in range(70):
        add_gemm_windowed(total, x.to(DEVICE).t(), w.to(DEVICE).t())
    assert_same(total, normalise_digits(71 * det_gemm_partial(x.t(), w.t())))


def test_parts_of_rows_cannot_be_seen(monkeypatch):
    rng = numbers(26)
    x, w = any_finite(rng, FLOAT32, (700, 60)), normal(rng, FLOAT32, (90, 60))
    monkeypatch.setattr(cuda_gemm_windowed, "rows_at_once", lambda *_: 256)
    assert_same(gemm_windowed(x.to(DEVICE), w.to(DEVICE)), det_gemm_partial(x, w))


@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_span_more_than_a_cut_are_split_by_exponents(side, monkeypatch):
    """Behind a softmax that is sure of its classes: no element is made on its own, and an infinity changes that alone."""
    rng = numbers(25)
    sure = (
        torch.softmax(9 * normal(rng, FLOAT32, (400, 160)), dim=1).t() - normal(rng, FLOAT32, (160, 400)).gt(2).float()
    )
    plain = normal(rng, FLOAT32, (90, 400))
    operands = (sure, plain) if side == 0 else (plain, sure)
    wanted = det_gemm_partial(*operands)
    full, bands = [], []
    of_digits, split = module._product_of_digits, module.bands_of_exponents
    monkeypatch.setattr(module, "_product_of_digits", lambda x, w: full.append(x) or of_digits(x, w))
    monkeypatch.setattr(module, "bands_of_exponents", lambda x, w: bands.append(x) or split(x, w))
    total = gemm_windowed(*(each.to(DEVICE) for each in operands))
    assert_same(total, wanted)
    first = plain[:1].expand(len(operands[0]), -1), operands[1]
    total = gemm_windowed(*(each.to(DEVICE) for each in first))
    add_gemm_windowed(total, *(each.to(DEVICE) for each in operands))
    assert_same(total, normalise_digits(wanted + det_gemm_partial(*first)))
    assert bands and not full
    operands[0][2, 3] = float("inf")
    assert_same(gemm_windowed(*(each.to(DEVICE) for each in operands)), det_gemm_partial(*operands))
    assert full


def test_rows_of_zeros_have_a_window_that_suits_the_next_product(monkeypatch):
    """As units that no sample of one micro-batch wakes."""
    rng = numbers(26)
    x, other, w = (normal(rng, FLOAT32, (rows, 64)) for rows in (140, 140, 70))
    x[::3] = 0
    on_device = [each.to(DEVICE) for each in (x, other, w)]
    total = gemm_windowed(on_device[0], on_device[2])
    monkeypatch.setattr(module, "_add_left", lambda *given, fresh: pytest.fail("elements were left out"))
    add_gemm_windowed(total, *on_device[1:])
    assert_same(total, normalise_digits(det_gemm_partial(x, w) + det_gemm_partial(other, w)))
