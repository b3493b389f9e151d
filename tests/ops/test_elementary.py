"""The functions of one variable against their definition on integers, against mpmath and against torch in float64.

By default: every special value, samples, inputs searched for whose exact result lies close to a tie, and every bfloat16
and float16 number. The exhaustive tests take every one of the 2^32 float32 inputs.
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from det_lightning.arithmetic.elementary import FUNCTIONS
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32
from det_lightning.errors import InputError
from det_lightning.kernels.cpu import elementary as cpu_elementary
from det_lightning.kernels.cpu.elementary import ALWAYS_IN_DOUBT, elementwise
from det_lightning.ops import elementary
from tests.ops.elementary_reference import REFERENCES, WORDS, by_mpmath, count_faults, defined, near_ties
from tests.ops.exact_oracle import float32
from tests.same_bits import assert_same_bits

INF, SIGN = 0x7F800000, 0x80000000
DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
PUBLIC = {name: getattr(elementary, f"det_{name}") for name in FUNCTIONS if not name.endswith("derivative")}
every = pytest.mark.parametrize("name", FUNCTIONS)
public = pytest.mark.parametrize("name", PUBLIC)
each_way = pytest.mark.parametrize("doubt", [None, ALWAYS_IN_DOUBT], ids=["short", "pairs"])

EDGES = [
    *(0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, INF, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
    *(0x3F7FFFFE, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F7FFF00, 0x3F800100, 0x3F317218, 0x402DF854),
    # Around 2^-26, 2^-25, 2^-24, where functions leave their value at zero, and 2^-12, 2^-10, where squares count.
    *(0x327FFFFF, 0x32800000, 0x33000000, 0x33000001, 0x33800000, 0x33800001, 0x39800000, 0x3A7FFFFF, 0x3A800000),
    # Where exp overflows, becomes subnormal and vanishes; 9.01 and 17.3, where tanh and sigmoid reach 1; 88 and 104.
    *(0x42B17217, 0x42B17218, 0x42B17219, 0x42AEAC4F, 0x42AEAC50, 0x42CFF1B4, 0x42CFF1B5, 0x42CFF1B6, 0x43000000),
    *(0x41102CB3, 0x41102CB4, 0x418AA123, 0x418AA124, 0x43960000, 0x43960001, 0x4E6E6B28),
    # The zeros of silu' and gelu', and where gelu vanishes; powers of four; the ends of the reciprocal's range.
    *(
        0x3FA3A0B6,
        0x3FA3A0B7,
        0x3FA3A0B8,
        0x3F407789,
        0x3F407A00,
        0x41640000,
        0x416A0000,
        0x40800000,
        0x41800000,
        0x00200000,
        0x7E800000,
        0x7E800001,
        0x60000000,
    ),
]


def samples(name: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    uniform, normal = torch.rand(count, generator=generator), torch.randn(count, generator=generator)
    patterns = torch.randint(1, INF, (count,), generator=generator, dtype=torch.int32).view(torch.float32)
    x = torch.cat([patterns, uniform * 193 - 104, normal, normal * 1e-4, 1 + normal * 1e-3, patterns * 2.0**-126])
    return x.abs() if name.startswith(("log", "sqrt", "rsqrt")) else x


def patterns_of(x: torch.Tensor) -> list[int]:
    return [pattern & 0xFFFFFFFF for pattern in x.view(torch.int32).flatten().tolist()]


def as_defined(name: str, x: torch.Tensor, form=FLOAT32) -> torch.Tensor:
    return defined(name, x, form).view(DTYPES[form])


@every
@each_way
@pytest.mark.parametrize("form", DTYPES, ids=lambda form: form.name)
def test_edges_are_as_defined_and_every_nan_is_canonical(name, doubt, form):
    x = float32(bits | sign for bits in EDGES for sign in (0, SIGN))
    result = elementwise(name, x, form, doubt=doubt)
    assert torch.equal(result.view(WORDS[form.bits]), defined(name, x, form))


@every
@each_way
def test_samples_are_as_defined(name, doubt):
    x = samples(name, 60)
    for form in DTYPES:
        assert_same_bits(elementwise(name, x, form, doubt=doubt), as_defined(name, x, form))


@every
def test_samples_are_the_nearest_floats_by_mpmath(name):
    x = samples(name, 15)
    expected = [by_mpmath(name, bits) for bits in patterns_of(x)]
    compared = torch.tensor([bits is not None for bits in expected])
    assert compared.float().mean() > 0.9
    expected = float32(bits for bits in expected if bits is not None)
    assert_same_bits(
        elementwise(name, x)[compared], torch.where(expected == 0, elementwise(name, x)[compared] * 0, expected)
    )


@every
def test_short_forms_and_pairs_agree_on_many_samples(name):
    x = samples(name, 2000)
    assert_same_bits(elementwise(name, x), elementwise(name, x, doubt=ALWAYS_IN_DOUBT))


@every
def test_results_close_to_a_tie_are_as_defined_and_by_mpmath(name):
    # A stretch of numbers on which every function varies.
    x = torch.arange(0x3F900000, 0x3F900000 + 1_000_000, dtype=torch.int32).view(torch.float32)
    hard = near_ties(name, x, within=2.0**-39)[:50]
    assert len(hard) > (5 if name not in ("tanh_derivative", "sqrt") else 1)
    result = elementwise(name, hard)
    assert_same_bits(result, as_defined(name, hard))
    assert_same_bits(result, float32(by_mpmath(name, bits) for bits in patterns_of(hard)))


@every
@pytest.mark.parametrize("form", [BFLOAT16, FLOAT16], ids=lambda form: form.name)
def test_every_number_of_a_narrow_format_is_rounded_once(name, form):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(DTYPES[form])
    faults, _ = count_faults(name, x, elementwise(name, x, form), form)
    assert faults == 0


@every
def test_ties_of_bfloat16_are_decided_by_what_lies_below_them(name):
    # Float32 numbers halfway between two of bfloat16, down to the smallest: f(x) may leave x by less than 2^-400.
    x = torch.cat([float32(e << 23 | m << 16 | 0x8000 for e in range(0, 255, 3)) for m in (0, 5)])
    x = torch.cat([x, -x])
    assert_same_bits(elementwise(name, x, BFLOAT16), as_defined(name, x, BFLOAT16))
    if name == "tanh":
        assert (elementwise(name, x, BFLOAT16) != elementwise(name, x).bfloat16()).any()  # two roundings


@pytest.mark.parametrize("name", ["exp", "expm1", "gelu", "log", "log1p", "rsqrt", "sigmoid", "softplus", "tanh"])
def test_the_function_of_torch_in_float32_fails_the_same_check(name):
    x = samples(name, 2500)
    theirs = getattr(torch if hasattr(torch, name) else torch.nn.functional, name)(x)
    assert count_faults(name, x, theirs)[0] > 0
    assert count_faults(name, x, elementwise(name, x)) == (0, count_faults(name, x, theirs)[1])


@public
def test_shape_strides_threads_and_empty_tensors(name):
    x = samples(name, 2000).view(60, 200)
    function = PUBLIC[name]
    expected = function(x)
    assert_same_bits(function(x.T).T, expected)
    assert_same_bits(function(x[::3, 1::2]), expected[::3, 1::2])
    assert_same_bits(function(torch._neg_view(-x)), expected)
    assert_same_bits(torch.stack([function(v) for v in x.flatten()[:50]]), expected.flatten()[:50])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_same_bits(function(x.repeat(4, 1)), expected.repeat(4, 1))
    finally:
        torch.set_num_threads(before)
    assert function(torch.ones(0, 3)).shape == (0, 3)
    assert function(torch.ones(())).shape == ()


@every
@each_way
def test_flushing_subnormals_in_the_calling_thread_changes_nothing(name, doubt):
    x = torch.cat([samples(name, 100), float32(EDGES)])
    expected = {form: elementwise(name, x, form, doubt=doubt) for form in DTYPES}
    assert torch.set_flush_denormal(True)
    try:
        results = {form: elementwise(name, x, form, doubt=doubt) for form in DTYPES}
    finally:
        torch.set_flush_denormal(False)
    for form in DTYPES:
        assert_same_bits(results[form], expected[form])


@public
def test_dtypes_in_and_out(name):
    x = samples(name, 40)
    for dtype, form in ((torch.bfloat16, BFLOAT16), (torch.float16, FLOAT16)):
        narrow = x.to(dtype)
        assert_same_bits(PUBLIC[name](narrow), as_defined(name, narrow, form))
        assert_same_bits(PUBLIC[name](narrow, dtype=torch.float32), as_defined(name, narrow))
        assert_same_bits(PUBLIC[name](x, dtype=dtype), as_defined(name, x, form))


@public
def test_misuse_is_refused(name):
    with pytest.raises(InputError, match=f"det_{name}: x has dtype float64; allowed: float32, bfloat16, float16"):
        PUBLIC[name](torch.ones(2, dtype=torch.float64))
    with pytest.raises(InputError, match="x is a float, not a tensor"):
        PUBLIC[name](1.0)
    with pytest.raises(InputError, match=f"det_{name}: dtype is torch.float64"):
        PUBLIC[name](torch.ones(2), dtype=torch.float64)


@pytest.mark.slow
@every
def test_many_random_patterns_are_as_defined(name):
    patterns = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(5))
    x = patterns.to(torch.int32).view(torch.float32)
    assert_same_bits(elementwise(name, x), as_defined(name, x))


@pytest.mark.exhaustive
@every
def test_all_inputs_are_the_nearest_float(name):
    """Every pattern: the float64 function of torch decides, and near ties the definition. One thread a core; minutes."""
    step = 1 << 20

    def faults_and_asked(first: int) -> tuple[int, int, int]:
        x = torch.arange(first, first + step, dtype=torch.int32).view(torch.float32)
        return first, *count_faults(name, x, elementwise(name, x))

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(faults_and_asked, range(-(1 << 31), 1 << 31, step)))
    finally:
        torch.set_num_threads(before)
    assert [hex(first & 0xFFFFFFFF) for first, faults, _ in found if faults] == []
    assert sum(asked for *_, asked in found) > 50, "the search has found nothing to ask the definition for"


def test_the_table_of_special_values_lives_as_long_as_a_kernel_reads_it(monkeypatch):
    """Also where two threads ask for it at once, and the cache keeps that of the other."""
    made, make, run = [], cpu_elementary._specials.__wrapped__, cpu_elementary.run_blocks

    def uncached(name, form):
        table = make(name, form)
        made.append(weakref.ref(table))
        return table

    def watched(*arguments):
        assert made[-1]() is not None
        return run(*arguments)

    monkeypatch.setattr(cpu_elementary, "_specials", uncached)
    monkeypatch.setattr(cpu_elementary, "run_blocks", watched)
    assert elementwise("gelu", torch.tensor([-0.0])).view(torch.int32).item() == -(1 << 31) and len(made) == 1


def test_there_is_a_reference_for_every_function():
    assert set(REFERENCES) == set(FUNCTIONS)
