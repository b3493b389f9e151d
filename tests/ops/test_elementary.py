"""det_exp and det_log against the definition on integers, and against mpmath.

What is tested by default: every special value, tens of thousands of samples, and inputs searched for whose exact result
lies within 2^-40 of a tie. The exhaustive tests take every one of the 2^32 inputs.
"""

import random
from fractions import Fraction

import mpmath
import pytest
import torch

from det_lightning.arithmetic import elementary
from det_lightning.arithmetic.formats import FLOAT32, decode
from det_lightning.errors import InputError
from det_lightning.kernels.cpu.elementary import elementwise
from det_lightning.ops.elementary import det_exp, det_log
from tests.arithmetic.nearest_float import nearest_float
from tests.ops.exact_oracle import float32
from tests.same_bits import assert_same_bits

NAN, INF, NEGATIVE_INF, ONE, SIGN = 0x7FC00000, 0x7F800000, 0xFF800000, 0x3F800000, 0x80000000
ALWAYS_IN_DOUBT = 1 << 62
FUNCTIONS = {
    "exp": (det_exp, elementary.exp, mpmath.exp, torch.exp),
    "log": (det_log, elementary.log, mpmath.log, torch.log),
}
both = pytest.mark.parametrize("name", FUNCTIONS)

# Patterns with an interesting exp, and those with an interesting log: each goes to both.
EDGES = [
    *(0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, INF, 0x7F800001, NAN, 0x7FFFFFFF),
    *(ONE, ONE - 1, ONE + 1, 0x3F7FFF00, 0x3F800100, 0x3F317218, 0x402DF854),
    *(0x32800000, 0x327FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x33800001),
    *(0x42B17217, 0x42B17218, 0x42B17219, 0x42AEAC4F, 0x42AEAC50, 0x42CFF1B4, 0x42CFF1B5, 0x42CFF1B6, 0x43000000),
    *(0x3FC00000, 0x3FBFFFFF, 0x3F400000, 0x3F3FFFFF, 0x3F810000, 0x3F80FFFF, 0x3F7F0000, 0x3F7EFFFF),
]


def unsigned(x: torch.Tensor) -> list[int]:
    return [pattern & 0xFFFFFFFF for pattern in x.view(torch.int32).flatten().tolist()]


def defined(name: str, x: torch.Tensor) -> torch.Tensor:
    return float32(map(FUNCTIONS[name][1], unsigned(x))).view(x.shape)


def by_mpmath(name: str, bits: int) -> int:
    significand, exponent = decode(bits, FLOAT32)
    with mpmath.workprec(250):
        sign, man, exp, _ = FUNCTIONS[name][2](mpmath.ldexp(significand, exponent))._mpf_
    return nearest_float((-1) ** sign * Fraction(int(man)) * Fraction(2) ** exp, FLOAT32)


def samples(name: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    uniform, normal = torch.rand(count, generator=generator), torch.randn(count, generator=generator)
    if name == "exp":
        return torch.cat([uniform * 193 - 104, normal, normal * 1e-4, -87 - 17 * uniform])
    patterns = torch.randint(1, INF, (count,), generator=generator, dtype=torch.int32).view(torch.float32)
    return torch.cat([patterns, uniform * 4, 1 + normal * 1e-3, patterns * 2.0**-126])


def bracket(name: str, x: torch.Tensor, within: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result of torch, moved down and up by `within` and rounded to float32.

    Where both agree, that is the nearest float32, because the error of the float64 function is far below `within`.
    Where they differ, the exact result lies close to a tie.
    """
    result = FUNCTIONS[name][3](x.double())
    return (result * (1 - within)).float(), (result * (1 + within)).float()


def near_ties(name: str, x: torch.Tensor, within: float) -> torch.Tensor:
    below, above = bracket(name, x, within)
    return x[below != above]


@both
@pytest.mark.parametrize("sign", [0, SIGN], ids=["positive", "negative"])
@pytest.mark.parametrize("doubt", [32, ALWAYS_IN_DOUBT], ids=["short", "double-double"])
def test_edges_are_as_defined(name, sign, doubt):
    x = float32(bits | sign for bits in EDGES)
    result = elementwise(name, x, doubt)
    assert_same_bits(result, defined(name, x))
    assert all(bits == NAN for bits in unsigned(result[result.isnan()]))


@both
@pytest.mark.parametrize("doubt", [32, ALWAYS_IN_DOUBT], ids=["short", "double-double"])
def test_samples_are_as_defined(name, doubt):
    x = samples(name, 2500)
    assert_same_bits(elementwise(name, x, doubt), defined(name, x))


@both
def test_samples_are_the_nearest_float_by_mpmath(name):
    x = samples(name, 500)
    x = x[(x != 0) & (x != 1)]
    expected = float32(by_mpmath(name, bits) for bits in unsigned(x))
    assert_same_bits(FUNCTIONS[name][0](x), expected)


@both
def test_both_evaluations_agree_on_many_samples(name):
    x = samples(name, 100_000)
    assert_same_bits(elementwise(name, x), elementwise(name, x, ALWAYS_IN_DOUBT))


@both
def test_results_close_to_a_tie_are_as_defined_and_by_mpmath(name):
    first = 0x3F800000 if name == "exp" else 0x40000000
    x = torch.arange(first, first + 3_000_000, dtype=torch.int32).view(torch.float32)
    hard = near_ties(name, x, 2.0**-40)
    assert len(hard) > 20
    result = FUNCTIONS[name][0](hard)
    assert_same_bits(result, defined(name, hard))
    assert_same_bits(result, float32(by_mpmath(name, bits) for bits in unsigned(hard)))


@both
def test_the_function_of_torch_in_float32_fails_the_same_check(name):
    x = samples(name, 2500)
    with pytest.raises(AssertionError, match="1 ulps apart"):
        assert_same_bits(FUNCTIONS[name][3](x), defined(name, x))


@both
def test_shape_strides_threads_and_empty_tensors(name):
    x = samples(name, 3000).view(60, 200)
    function = FUNCTIONS[name][0]
    expected = function(x)
    assert_same_bits(function(x.T).T, expected)
    assert_same_bits(function(x[::3, 1::2]), expected[::3, 1::2])
    assert_same_bits(torch.stack([function(v) for v in x.flatten()[:50]]), expected.flatten()[:50])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_same_bits(function(x.repeat(20, 1)), expected.repeat(20, 1))
    finally:
        torch.set_num_threads(before)
    assert function(torch.ones(0, 3)).shape == (0, 3)
    assert function(torch.ones(())).shape == ()


@both
@pytest.mark.parametrize("doubt", [32, ALWAYS_IN_DOUBT], ids=["short", "double-double"])
def test_flushing_subnormals_in_the_calling_thread_changes_nothing(name, doubt):
    x = torch.cat([samples(name, 300), float32(EDGES)])
    expected = elementwise(name, x, doubt)
    assert torch.set_flush_denormal(True)
    try:
        result = elementwise(name, x, doubt)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(result, expected)


@both
def test_misuse_is_refused(name):
    with pytest.raises(InputError, match=f"det_{name}: x has dtype bfloat16; allowed: float32"):
        FUNCTIONS[name][0](torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="x is a float, not a tensor"):
        FUNCTIONS[name][0](1.0)


@pytest.mark.slow
@both
def test_many_random_patterns_are_as_defined(name):
    rng = random.Random(5)
    x = float32(rng.getrandbits(32) for _ in range(300_000))
    assert_same_bits(FUNCTIONS[name][0](x), defined(name, x))


@pytest.mark.exhaustive
@both
def test_all_inputs_are_the_nearest_float(name):
    """Every pattern: within 2^-47 of a tie against the definition, else against the float64 function of torch."""
    step = 1 << 23
    hard_inputs = 0
    for first in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(first, first + step, dtype=torch.int64).to(torch.int32).view(torch.float32)
        result = elementwise(name, x)
        below, above = bracket(name, x, 2.0**-47)
        hard = (below != above) & ~x.isnan() & ~below.isnan()
        assert_same_bits(result[~hard], below[~hard])
        assert_same_bits(result[hard], defined(name, x[hard]))
        hard_inputs += int(hard.sum())
    # About 2^-22 of the inputs with a result of their own: the search has found something to check.
    assert hard_inputs > 50
