"""The kernels on windowed digits against the CPU's, byte for byte, without a GPU: run by an emulator (`emulator`)."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic.formats import DIGITS, FORMATS, NB  # noqa: E402
from det_lightning.arithmetic.windowed_digits import words_for  # noqa: E402
from det_lightning.kernels import cuda_windowed_digits as emulated  # noqa: E402
from det_lightning.kernels.cpu import windowed_digits as on_cpu  # noqa: E402
from det_lightning.ops.gemm import det_gemm_partial  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits  # noqa: E402
from tests.ops.exact_oracle import INF, NAN, wide_values  # noqa: E402

from . import emulator as emulation  # noqa: E402

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no g++ since 12")

KERNELS = "needs needs_of_words agree from_states add_to_states grow carry round round_eight round_long".split()
CASE = 'if (asked == "windowed_{0}") return grid::call(windowed_{0}, columns, rows, count, values), 0;'
PROGRAM = f"""
#include "call.h"
#include "windowed_digits.cu"
#include <string>
extern "C" int launch(const char* name, unsigned columns, unsigned rows, unsigned count, const long long* values) {{
    std::string asked = name;
    {" ".join(CASE.format(kernel) for kernel in KERNELS)}
    return 1;
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulator")
    emulation.Emulator(folder)  # writes the sources
    return emulation.build(PROGRAM, folder / "windows.so")


@pytest.fixture(autouse=True)
def launched(library, monkeypatch):
    """The wrappers launch emulated kernels; how often each was launched."""
    counts = dict.fromkeys(KERNELS, 0)

    def launch(device, source, kernel, blocks, threads, *arguments):
        assert source == "windowed_digits"
        values = (ctypes.c_longlong * len(arguments))(*arguments)
        columns, rows = (*blocks, 1)[:2]
        assert library.launch(kernel.encode(), columns, rows, threads, values) == 0, kernel
        emulation.check_faults(library, kernel)
        counts[kernel.removeprefix("windowed_")] += 1

    monkeypatch.setattr(emulated, "launch", launch)
    monkeypatch.setattr(emulated, "_THREADS", 32)
    monkeypatch.setattr(emulated, "_table", lambda operands, device: torch.tensor(
        [(words.data_ptr(), words.stride(0)) for words in operands], dtype=torch.int64
    ))  # fmt: skip
    return counts


def digits_of(rows: int, columns: int, seed: int, spread: int = 40) -> torch.Tensor:
    """int64 [rows, columns, NB]; the last row is zero."""
    x, w = wide_values(seed, rows, 3, spread=spread), wide_values(seed + 1, columns, 3, spread=spread)
    x[-1] = 0
    return det_gemm_partial(x, w)


@pytest.mark.parametrize("special", [False, True])
def test_what_digits_need_and_the_window_of_several_ranks(special):
    parts = [digits_of(4, 37, 5), digits_of(4, 37, 9, spread=3)]
    if special:
        parts[1][2, 5, DIGITS] += 1
    needs = [emulated.needs(part, 4) for part in parts]
    assert all(torch.equal(found, on_cpu.needs(part, 4)) for found, part in zip(needs, parts, strict=True))
    together = torch.maximum(*needs)
    for a, b in zip(emulated.agree(together), on_cpu.agree(together), strict=True):
        assert torch.equal(a, b)
    assert together[-1] == special and emulated.agree(together)[0][-1] == 0


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("fits", [True, False])
def test_words_for_the_shares_of_ranks(shares, fits):
    digits = digits_of(4, 33, 3)
    base, facts = on_cpu.agree(on_cpu.needs(digits, 4))
    count = words_for(0, int(facts[1])) if fits else 2
    found, expected = torch.zeros((2, shares, count, 4 // shares * 33), dtype=torch.int32)
    states = digits.view(-1, NB)
    misfits = emulated.fill(states, base, found)
    assert torch.equal(misfits, on_cpu.fill(states, base, expected)) and misfits.item() == (not fits)
    assert torch.equal(found, expected) or not fits
    whole = torch.zeros((1, count, 4 * 33), dtype=torch.int32)
    on_cpu.fill(states, base, whole)
    assert torch.equal(found.transpose(0, 1).reshape(count, -1), whole[0]) or not fits


def windows(words: int, parts: int, gap: int = 0) -> list[WindowedDigits]:
    """Windows of one base, at equal distances or (gap) not, with ties, extremes and rows of small sums."""
    generator = torch.Generator().manual_seed(100 * words + parts)
    base = torch.tensor([-298, -180, -160, -149, -140, -126, -60])
    memory = torch.randint(-(2**25), 2**25, (parts, words, 7, 41), generator=generator, dtype=torch.int32)
    memory[:, :, 0, :5] = torch.tensor([0, 1, -1, 2**25 - 1, -(2**25)], dtype=torch.int32)
    memory[:, 1:, 1] = 0
    memory[1:, :, 2] = 0
    memory[0, :, 2, ::2] &= -(2**20)  # few bits set: ties
    memory[:, 0, 3] = 0
    return [WindowedDigits(base, (part.clone() if gap else part)) for part in memory]


@pytest.mark.parametrize(
    ("words", "parts", "apart"),
    [
        (1, 1, 0),
        (2, 3, 0),
        (3, 1, 0),
        (3, 2, 1),
        (4, 2, 0),
        (5, 1, 0),
        (5, 2, 1),
        (6, 3, 0),
        (7, 1, 0),
        (8, 2, 0),
        (9, 1, 0),
    ],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_sums_of_windows_divided_and_rounded_once(launched, words, parts, apart, name):
    planes = [window.words.view(words, -1) for window in windows(words, parts, apart)]
    base = windows(words, parts)[0].base
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    for denominator in (1, 3, 8, 24, 1000003, 2**31 - 1):
        found, expected = torch.empty((2, 7 * 41), dtype=dtype)
        emulated.round_sum(planes, base, FORMATS[name], denominator, found)
        on_cpu.round_sum(planes, base, FORMATS[name], denominator, expected)
        bits = torch.int32 if dtype is torch.float32 else torch.int16
        assert torch.equal(found.view(bits), expected.view(bits)), denominator
    assert launched["round" if words <= 4 else "round_eight" if words <= 8 else "round_long"] == 6
    # Rounding the sum before the division is another number.
    once = torch.empty(7 * 41, dtype=dtype)
    emulated.round_sum(planes, base, FORMATS[name], 1, once)
    emulated.round_sum(planes, base, FORMATS[name], 3, found)
    assert words == 1 or name == "float16" or not torch.equal((once.float() / 3).to(dtype).view(bits), found.view(bits))


@pytest.mark.parametrize("words", [4, 5, 6, 7, 8])
def test_words_of_any_size_and_sums_that_cancel_far_down(words):
    generator = torch.Generator().manual_seed(words)
    extremes = torch.tensor(
        [-(2**31), 2**31 - 1, 0, 0, 0, 1, -1, 2**25, -(2**25), 2**26, -(2**26), 2**30], dtype=torch.int32
    )
    memory = extremes[torch.randint(len(extremes), (2, words, 4000), generator=generator)]
    memory[1, :, :1500] = -memory[0, :, :1500]  # all that is left is in the lowest words
    memory[1, 0, :1500] += torch.randint(-2, 3, (1500,), generator=generator, dtype=torch.int32)
    base = torch.tensor([-298, -230, -180, -150])
    for denominator in (1, 3, 2**31 - 1):
        found, expected = torch.empty((2, 4000))
        emulated.round_sum(list(memory), base, FORMATS["float32"], denominator, found)
        on_cpu.round_sum(list(memory), base, FORMATS["float32"], denominator, expected)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_states_growth_and_carries():
    digits = digits_of(3, 20, 7, spread=8)
    window = WindowedDigits.from_digits(digits)
    planes = window.words.view(window.words.shape[0], -1)
    states, expected = torch.zeros((2, 60, NB), dtype=torch.int64)
    emulated.add_to_states(planes, window.base, states)
    on_cpu.add_to_states(planes, window.base, expected)
    assert torch.equal(states, expected)
    lower_by = torch.tensor([0, 5, 77])
    for count in (planes.shape[0], planes.shape[0] + 4):
        a, b = torch.zeros((2, count, 60), dtype=torch.int32)
        assert emulated.grow(planes, lower_by, a) == on_cpu.grow(planes, lower_by, b)
    assert torch.equal(a, b)
    many = planes * 31
    other = many.clone()
    assert emulated.carry(many) == on_cpu.carry(other) and torch.equal(many, other)


@pytest.mark.parametrize("states", [1, 63])
def test_what_words_need_and_words_on_other_bases(states):
    window = WindowedDigits.from_digits(digits_of(4, 37, 11, spread=12))
    planes = window.words.view(window.words.shape[0], -1) * states
    planes[0, :3] = torch.tensor([2**31 - 1, -(2**31), 1 - 2**31], dtype=torch.int32)
    needs = emulated.needs_of_words(planes, window.base)
    assert torch.equal(needs, on_cpu.needs_of_words(planes, window.base))
    base, facts = on_cpu.agree(needs)
    exact = words_for(0, int(facts[1]))
    for shift, count, fits in ((0, exact, True), (0, exact - 1, False), (1, exact, False), (-40, exact + 2, True)):
        found, expected = torch.zeros((2, count, 4 * 37), dtype=torch.int32)
        misfits = emulated.refill(planes, window.base - base - shift, found)
        assert torch.equal(misfits, on_cpu.refill(planes, window.base - base - shift, expected))
        assert misfits.item() == (not fits) and torch.equal(found, expected)


def test_infinities_and_nans_are_needs_of_their_own():
    x = torch.tensor([[1.0, INF], [NAN, 2.0], [1.0, 2.0]])
    digits = det_gemm_partial(x, torch.ones(2, 2))
    assert emulated.needs(digits, 3)[-1] == 1 and emulated.needs(digits[2:], 1)[-1] == 0
    assert torch.equal(emulated.needs(digits, 3), on_cpu.needs(digits, 3))
