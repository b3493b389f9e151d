"""Sums by index and windowed digits on CUDA tensors: the bytes and the errors of the CPU."""

import pytest

torch = pytest.importorskip("torch")

from det_lightning.errors import InputError  # noqa: E402
from det_lightning.ops.digits import zero_digits  # noqa: E402
from det_lightning.ops.gemm import det_gemm_partial  # noqa: E402
from det_lightning.ops.scatter import (  # noqa: E402
    add_embedding_digits,
    add_index_digits,
    det_index_add,
    det_scatter_add,
    embedding,
    embedding_gradient,
)
from det_lightning.ops.window_agreement import agreed_window, needs_of_window, refill_words  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits, round_sum, window_bounds  # noqa: E402

from .conftest import DEVICE, to_bits  # noqa: E402
from .test_ops_on_gpu import FLOATS, assert_same_on_both, tensor  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels")]


def indices(count: int, size: int, seed: int = 0, common: int | None = None) -> "torch.Tensor":
    """Places in [0, size); half of them `common` if it is given."""
    index = torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(seed))
    return index if common is None else torch.where(torch.arange(count) % 2 == 0, common, index)


def wide(*shape: int, seed: int = 0, special: bool = False) -> "torch.Tensor":
    """Numbers of very different sizes, some of them subnormal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-140, 100, shape, generator=generator).float()
    )
    if special:
        x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("common", [None, 3], ids=["spread", "one large group"])
def test_index_add_and_embedding_gradients(dtype, common):
    index, source = indices(3001, 40, common=common), tensor(3001, 33, special=True).to(dtype)
    assert_same_on_both(lambda x, i, s: det_index_add(x, 0, i, s), tensor(40, 33, seed=1).to(dtype), index, source)
    assert_same_on_both(lambda x, i, s: det_index_add(x, 1, i, s.t()), tensor(33, 40, seed=2).to(dtype), index, source)
    assert_same_on_both(lambda s, i: embedding_gradient(s, i, 50, padding_idx=7), source, index)
    assert_same_on_both(lambda s, i: embedding_gradient(s, i, 50, dtype=torch.float32), source, index)


def test_sums_of_very_different_terms_and_groups_of_none_and_one():
    index, source = indices(700, 600), wide(700, 5, special=True)
    for dtype in FLOATS:
        assert_same_on_both(lambda s, i, dtype=dtype: embedding_gradient(s, i, 600, dtype=dtype), source, index)
    assert_same_on_both(lambda x, i, s: det_index_add(x, 0, i, s), wide(600, 5, seed=1), index.int(), source)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scatter_add(dim):
    x = tensor(9, 8, 7)
    index = torch.randint(0, x.shape[dim], (6, 7, 5), generator=torch.Generator().manual_seed(1))
    assert_same_on_both(lambda x, i, s: det_scatter_add(x, dim, i, s), x, index, wide(9, 8, 7, seed=2))


@pytest.mark.parametrize("common", [None, 0])
def test_digits_by_index_are_the_same_in_every_place(common):
    def run(source, index):
        digits = zero_digits((12, 30), device=source.device)
        digits += 5
        add_index_digits(digits, index, source)
        add_embedding_digits(digits, source, index, padding_idx=2)
        add_index_digits(digits.transpose(0, 1)[:12, :12], index, source[:, :12])
        return digits

    assert_same_on_both(run, wide(2000, 30, special=True), indices(2000, 12, common=common))


def test_nothing_to_add():
    assert_same_on_both(lambda s, i: embedding_gradient(s, i, 5), tensor(0, 3), indices(0, 5))
    assert_same_on_both(lambda s, i: embedding_gradient(s, i, 5), tensor(4, 0), indices(4, 5))
    assert_same_on_both(lambda x, i, s: det_index_add(x, 0, i, s), tensor(5, 3), indices(0, 5), tensor(0, 3))


def test_an_embedding_forward_and_backward():
    def run(weight, index):
        weight = weight.detach().clone().requires_grad_()
        y = embedding(index.view(10, 20), weight)
        (y * y).backward(torch.ones_like(y))
        return y.detach(), weight.grad

    assert_same_on_both(run, tensor(30, 16), indices(200, 30))


def test_an_index_outside_is_refused():
    with pytest.raises(InputError, match=r"index goes from 0 to 9; it must stay in \[0, 9\)"):
        embedding_gradient(tensor(10, 2).to(DEVICE), torch.arange(10, device=DEVICE), 9)


def windows(device: str, words: int, parts: int, narrow: bool) -> "list[WindowedDigits]":
    generator = torch.Generator().manual_seed(words)
    base = torch.randint(-150 if narrow else -298, -60, (7,), generator=generator).to(device)
    values = torch.randint(-(2**25), 2**25, (parts, words, 7, 41), generator=generator, dtype=torch.int32)
    values[:, :, 0, :5] = torch.tensor([0, 1, -1, 2**25 - 1, -(2**25)], dtype=torch.int32)
    values[:, 1:, 1] = 0  # small sums, and ties among them
    return [WindowedDigits(base, part.to(device)) for part in values]


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("parts", [1, 2, 60])
def test_rounding_sums_of_windows(words, parts):
    for narrow in (True, False):
        ours, theirs = windows(DEVICE, words, parts, narrow), windows("cpu", words, parts, narrow)
        for dtype in FLOATS:
            for denominator in (1, 8, 12, 1000003, 2**31 - 1, 0, 2**40):
                found = round_sum(ours, dtype=dtype, denominator=denominator)
                wanted = round_sum(theirs, dtype=dtype, denominator=denominator)
                assert to_bits(found).tobytes() == to_bits(wanted).tobytes(), (dtype, denominator, narrow)


def test_ties_of_windows_are_decided_by_the_last_bit():
    values = [1 << 25, (1 << 25) + 2, (3 << 24) + 1, -(1 << 25) + 1, 12345677, -12345679]
    base = torch.tensor([-160, -149, -126, 0, 90, 102])
    words = torch.tensor([values, [0, 1, 0, -1, 2, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.int32).unsqueeze(2)
    for shifted in range(-3, 4):
        for dtype in FLOATS:
            ours = WindowedDigits((base + shifted).to(DEVICE), words.to(DEVICE)).round(dtype=dtype)
            assert (
                to_bits(ours).tobytes() == to_bits(WindowedDigits(base + shifted, words).round(dtype=dtype)).tobytes()
            )


def test_the_life_of_a_window():
    def run(x, w):
        digits = det_gemm_partial(x, w)
        low, high = window_bounds(digits)
        window = WindowedDigits.from_digits(digits)
        other = WindowedDigits.from_digits(det_gemm_partial(x * 2.0**30, w), window.base, 1)
        rounded = round_sum([window, other])
        window.add_(other).normalise_()
        window.grow_(window.base - 77, window.words.shape[0] + 1)
        return low, high, window.base, window.words, window.to_digits(), window.round(denominator=3), rounded

    for seed in range(3):
        for special in (False, True):
            assert_same_on_both(run, wide(6, 3, seed=seed, special=special) * 2.0**-40, tensor(5, 3, seed=seed))
    assert_same_on_both(run, tensor(6, 300), tensor(70, 300, seed=1))
    assert_same_on_both(run, torch.zeros(2, 3), tensor(5, 3))


def test_carries_and_values_that_leave_their_window():
    def run(values):
        window = WindowedDigits(torch.tensor([-20], device=values.device), values, states=1)
        window.words = window.words * 31
        window.normalise_()
        return window.base, window.words

    words = torch.randint(-(2**25), 2**25, (3, 1, 400), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert_same_on_both(run, words)


def test_a_state_that_is_not_canonical():
    digits = torch.randint(-(2**62), 2**62, (4, 9, 21), generator=torch.Generator().manual_seed(2))
    digits[..., 17] >>= 8
    digits[..., 18:] = 0
    assert_same_on_both(lambda d: WindowedDigits.from_digits(d).words, digits)
    assert_same_on_both(lambda d: WindowedDigits.from_digits(d).to_digits(), digits)
    assert_same_on_both(lambda d: window_bounds(d), digits)


@pytest.mark.parametrize("states", [1, 63])
def test_what_words_need_and_words_on_other_bases(states):
    def run(x, w):
        window = WindowedDigits.from_digits(det_gemm_partial(x, w)).in_rows_of(128)
        window.words.mul_(states)
        needs = needs_of_window(window)
        base, facts = agreed_window(needs)
        rooms = [torch.zeros((count, *window.shape), dtype=torch.int32, device=x.device) for count in (2, 5, 24)]
        return needs, base, facts, rooms[2], *(refill_words(window, base - shift, rooms[2]) for shift in (0, 9)), *(
            refill_words(window, base + 1, room) for room in rooms
        )  # fmt: skip

    for seed in range(3):
        assert_same_on_both(run, wide(6, 3, seed=seed), wide(512, 3, seed=seed + 9))
        assert_same_on_both(run, tensor(6, 3, seed=seed), tensor(1280, 3, seed=seed + 9))
