"""The CUDA kernels against the definitions in `arithmetic/` and against plain fractions, byte for byte."""

import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from det_lightning.arithmetic import long_accumulator, tensor_digest
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, NB, decode, is_nan

pytestmark = pytest.mark.cuda

FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
BITS = {FLOAT32: np.uint32, BFLOAT16: np.uint16, FLOAT16: np.uint16}
ONE = 0x3F800000
SPECIAL = {
    "+0": 0x00000000,
    "-0": 0x80000000,
    "1": ONE,
    "-1": 0xBF800000,
    "smallest subnormal": 0x00000001,
    "largest subnormal": 0x807FFFFF,
    "smallest normal": 0x00800000,
    "largest finite": 0x7F7FFFFF,
    "-largest finite": 0xFF7FFFFF,
    "+inf": 0x7F800000,
    "-inf": 0xFF800000,
    "signalling nan": 0x7F800001,
    "nan with payload": 0xFFC12345,
}


def finite_bits(rng, form, shape) -> np.ndarray:
    """Random finite bits over the whole exponent range, with zeros and ends of binades among them."""
    field = rng.integers(0, form.exponent_mask, shape)
    fraction = rng.integers(0, 1 << form.fraction_bits, shape)
    fraction = np.where(rng.random(shape) < 0.2, rng.choice([0, (1 << form.fraction_bits) - 1], shape), fraction)
    sign = rng.integers(0, 2, shape) * form.sign_bit
    return (sign | field << form.fraction_bits | fraction).astype(BITS[form])


def value(bits: int, form) -> Fraction:
    significand, exponent = decode(int(bits), form)
    return Fraction(significand) * Fraction(2) ** exponent


def nearest_bits(exact: Fraction, form) -> int:
    """The float nearest to a fraction, by halving the ordered patterns: no formula of the product is used."""
    low, high = 0, form.infinity_bits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle, form) <= abs(exact) else (low, middle)
    above = value(high, form) if high < form.infinity_bits else Fraction(2) ** form.top_exponent
    half = (value(low, form) + above) / 2
    up = abs(exact) > half or (abs(exact) == half and low & 1)
    return (high if up else low) | (form.sign_bit if exact < 0 else 0)


def expected_state(pairs) -> list[int]:
    """Canonical digits of sum of a * b over (a bits, a format, b bits, b format)."""
    state = long_accumulator.zero_state()
    for a, a_form, b, b_form in pairs:
        if a_form is b_form:
            long_accumulator.add_product(state, int(a), int(b), a_form)
        else:
            long_accumulator.add_product(state, as_float32(a, a_form), as_float32(b, b_form))
    return long_accumulator.normalise(state)


def as_float32(bits, form) -> int:
    """The same value in float32, which holds all values of the narrower formats."""
    bits = int(bits)
    if bits & ~form.sign_bit >= form.infinity_bits:
        special = FLOAT32.nan_bits if is_nan(bits, form) else FLOAT32.infinity_bits
        return special | (FLOAT32.sign_bit if bits & form.sign_bit else 0)
    zero = FLOAT32.sign_bit if bits & form.sign_bit else 0
    return nearest_bits(value(bits, form), FLOAT32) or zero


@pytest.mark.parametrize("depth", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize("x_form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("w_form", FORMATS, ids=lambda form: form.name)
def test_gemm_partial_returns_the_canonical_digits(kernels, x_form, w_form, depth):
    rng = np.random.default_rng(depth)
    x, w = finite_bits(rng, x_form, (3, depth)), finite_bits(rng, w_form, (5, depth))
    digits = kernels.gemm_partial(x, x_form, w, w_form)
    for i in range(3):
        for j in range(5):
            pairs = [(x[i, k], x_form, w[j, k], w_form) for k in range(depth)]
            assert digits[i, j].tolist() == expected_state(pairs)


@pytest.mark.parametrize("out_form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_gemm_is_the_exact_sum_with_its_bias_rounded_once(kernels, form, out_form):
    rng = np.random.default_rng(7)
    x, w, bias = finite_bits(rng, form, (4, 40)), finite_bits(rng, form, (6, 40)), finite_bits(rng, form, 6)
    plain = kernels.gemm(x, form, w, form, out_form)
    shifted = kernels.gemm(x, form, w, form, out_form, bias, form)
    for i in range(4):
        for j in range(6):
            exact = sum(value(a, form) * value(b, form) for a, b in zip(x[i], w[j], strict=True))
            assert plain[i, j] == nearest_bits(exact, out_form)
            assert shifted[i, j] == nearest_bits(exact + value(bias[j], form), out_form)


def test_every_pair_of_special_values_multiplies_as_the_contract_says(kernels):
    column = np.array(list(SPECIAL.values()), np.uint32)[:, None]
    digits = kernels.gemm_partial(column, FLOAT32, column, FLOAT32)
    out = kernels.gemm(column, FLOAT32, column, FLOAT32, FLOAT32)
    for i, a in enumerate(column[:, 0]):
        for j, b in enumerate(column[:, 0]):
            state = expected_state([(a, FLOAT32, b, FLOAT32)])
            assert digits[i, j].tolist() == state
            assert out[i, j] == long_accumulator.finalize(state)


def test_infinities_of_both_signs_are_the_canonical_nan_and_zero_sums_are_positive(kernels):
    x = np.array([[0x7F800000, 0xFF800000], [ONE, 0xBF800000], [0x80000000, 0x80000000]], np.uint32)
    ones = np.array([[ONE, ONE]], np.uint32)
    assert kernels.gemm(x, FLOAT32, ones, FLOAT32, FLOAT32)[:, 0].tolist() == [0x7FC00000, 0, 0]


def test_one_tiny_term_breaks_a_tie_that_float64_cannot_see(kernels):
    # 2^24 + 1 is a tie in float32; 2^-298 more, or less, decides it.
    x = np.array([[0x4B800000, ONE, 1], [0x4B800000, ONE, 0x80000001], [0x4B800000, ONE, 0]], np.uint32)
    w = np.array([[ONE, ONE, 1]], np.uint32)
    assert kernels.gemm(x, FLOAT32, w, FLOAT32, FLOAT32)[:, 0].tolist() == [
        0x4B800001,
        0x4B800000,
        0x4B800000,
    ]
    # The negative control: accumulation in float64 gives one answer to all three.
    impostor = x.view(np.float32).astype(np.float64) @ w.view(np.float32).astype(np.float64).T
    assert len(set(impostor.astype(np.float32).ravel().tolist())) == 1


def test_overflow_starts_half_an_ulp_above_the_largest_finite_value(kernels):
    largest, half_ulp = 0x7F7FFFFF, 0x73000000  # half_ulp = 2^103
    x = np.array([[largest, half_ulp, 0x80000001], [largest, half_ulp, 0], [largest, largest, 0]], np.uint32)
    w = np.array([[ONE, ONE, 1]], np.uint32)
    assert kernels.gemm(x, FLOAT32, w, FLOAT32, FLOAT32)[:, 0].tolist() == [largest, 0x7F800000, 0x7F800000]


@pytest.mark.parametrize("parts", [2, 4, 8, 16])
def test_shards_of_k_compose_to_the_same_bytes(kernels, parts):
    rng = np.random.default_rng(parts)
    x, w = finite_bits(rng, FLOAT32, (33, 999)), finite_bits(rng, FLOAT32, (17, 999))
    cuts = np.linspace(0, 999, parts + 1).astype(int)
    shards = [
        kernels.gemm_partial(np.ascontiguousarray(x[:, a:b]), FLOAT32, np.ascontiguousarray(w[:, a:b]), FLOAT32)
        for a, b in pairwise(cuts)
    ]
    total = kernels.digits_add(shards[::-1])
    whole = kernels.gemm_partial(x, FLOAT32, w, FLOAT32)
    assert kernels.digits_normalise(total).tobytes() == whole.tobytes()
    rounded = kernels.digits_finalize(total, 1, FLOAT32)
    assert rounded.tobytes() == kernels.gemm(x, FLOAT32, w, FLOAT32, FLOAT32).tobytes()


def test_the_order_of_k_does_not_matter_here_and_does_in_the_vendor_product(kernels):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 4096)).astype(np.float32)
    w = rng.standard_normal((64, 4096)).astype(np.float32)
    order = rng.permutation(4096)
    shuffled = np.ascontiguousarray(x[:, order]), np.ascontiguousarray(w[:, order])
    bits = [(a.view(np.uint32), b.view(np.uint32)) for a, b in ((x, w), shuffled)]
    first, second = (kernels.gemm(a, FLOAT32, b, FLOAT32, FLOAT32).tobytes() for a, b in bits)
    assert first == second
    torch = pytest.importorskip("torch")
    on_gpu = [[torch.from_numpy(array).cuda() for array in pair] for pair in ((x, w), shuffled)]
    stock = [(a @ b.t()).cpu().numpy().tobytes() for a, b in on_gpu]
    assert stock[0] != stock[1]


def random_states(count: int) -> np.ndarray:
    """States of every kind: sparse, dense, near ties, negative, far from canonical."""
    rng = random.Random(11)
    states = []
    for i in range(count):
        width = rng.choice([33, 48, 64])
        dense = rng.choice([0.1, 1.0])
        digits = [rng.getrandbits(width) - (1 << width - 1) if rng.random() < dense else 0 for _ in range(NB - 3)]
        if i % 3 == 0:
            tie = (rng.getrandbits(24) | 1 << 24 | 1) << rng.randint(0, 500)
            digits = long_accumulator.digits_of(rng.choice([1, -1]) * (tie + rng.choice([-1, 0, 1])))
        counts = [rng.choice([1, 2**40]) if rng.random() < 0.03 else 0 for _ in range(3)]
        states.append([*digits, *counts])
    return np.array([*states, [0] * NB, [2**63 - 1] * (NB - 3) + [0] * 3, [-(2**63)] * (NB - 3) + [0] * 3], np.int64)


@pytest.mark.parametrize("denominator", [0, 1, 2, 3, 7, 10**6, 2**32 - 1, 2**32 + 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_digits_finalize_rounds_any_state_over_any_denominator(kernels, form, denominator):
    states = random_states(2000)
    rounded = kernels.digits_finalize(states, denominator, form)
    assert rounded.tolist() == [long_accumulator.finalize(state, form, denominator) for state in states.tolist()]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1000,), 0), ((100_003,), 0), ((5, 333), 1), ((333, 5), 0), ((3, 40, 7), 1), ((4, 0), 1), ((1, 1), 0),
        ((2, 700, 300), 1), ((5000, 10), 1), ((40, 17), 1),
    ],
)  # fmt: skip
def test_sum_states_is_exact_for_any_dimension(kernels, form, shape, dim):
    x = finite_bits(np.random.default_rng(3), form, shape)
    x.flat[: min(2, x.size)] = form.infinity_bits
    rows = np.moveaxis(x, dim, -1).reshape(x.size // shape[dim] if shape[dim] else shape[0], shape[dim])
    expected, square = [], long_accumulator.zero_state()
    for row in rows[:400]:
        state = long_accumulator.zero_state()
        for bits in row.tolist():
            long_accumulator.add_term(state, bits, form)
        expected.append(long_accumulator.normalise(state))
    assert kernels.sum_states(x, form, dim).reshape(-1, NB)[:400].tolist() == expected
    some = x.ravel()[:3000]
    for bits in some.tolist():
        long_accumulator.add_product(square, bits, bits, form)
    assert kernels.sum_states(some, form, 0, squares=True).tolist() == long_accumulator.normalise(square)


@pytest.mark.parametrize("spread", [0, 3, 40, 120])
def test_sum_states_is_exact_where_terms_leave_the_window_of_their_neighbours(kernels, spread):
    rng = np.random.default_rng(spread)
    x = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-spread, spread + 1, 50_000)).astype(np.float32)
    exact = sum((Fraction(float(v)) for v in x), Fraction(0))
    state = kernels.sum_states(x.view(np.uint32), FLOAT32, 0).reshape(-1)
    assert long_accumulator.fraction_of(state.tolist()) == exact


# (kernel's code, bits of an element, format of a float)
ELEMENTS = {
    "float32": (0, 32, FLOAT32),
    "bfloat16": (1, 16, BFLOAT16),
    "float16": (2, 16, FLOAT16),
    "float64": (3, 64, FLOAT64),
    "uint8": (4, 8, None),
    "int16": (5, 16, None),
    "int32": (6, 32, None),
    "int64": (7, 64, None),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_tensor_digest_has_the_lanes_of_the_definition_however_it_is_sharded(kernels, name):
    code, width, form = ELEMENTS[name]
    rng = np.random.default_rng(code)
    elements = rng.integers(0, 1 << width, 3001, np.uint64).astype(f"u{width // 8}")
    if form:
        elements[5:8] = [form.nan_bits | 1, form.nan_bits | form.sign_bit, form.infinity_bits]
    expected = tensor_digest.lanes(tensor_digest.words_of(elements.tolist(), width, form))
    assert kernels.tensor_digest(elements, code) == expected
    parts = [kernels.tensor_digest(elements[a:b], code, a) for a, b in ((0, 1), (1, 2000), (2000, 3001))]
    assert tuple(sum(lane) % 2**64 for lane in zip(*parts, strict=True)) == expected
    elements[1234] ^= 1
    changed = kernels.tensor_digest(elements, code)
    assert changed[0] != expected[0] and changed[1] != expected[1]


def test_tensor_digest_counts_places_beyond_32_bits(kernels):
    elements = np.arange(100, dtype=np.uint32)
    first = 2**33 + 5
    expected = tensor_digest.lanes(elements.tolist(), first)
    assert kernels.tensor_digest(elements, 6, first) == expected


@pytest.mark.parametrize("out_form", (FLOAT32, BFLOAT16), ids=lambda form: form.name)
@pytest.mark.parametrize("form", (FLOAT32, BFLOAT16), ids=lambda form: form.name)
def test_cpu_and_gpu_return_the_same_bytes(kernels, form, out_form):
    torch = pytest.importorskip("torch")
    from det_lightning.ops.gemm import det_gemm

    rng = np.random.default_rng(9)
    x, w = finite_bits(rng, form, (65, 300)), finite_bits(rng, form, (47, 300))
    types = {
        FLOAT32: (torch.int32, torch.float32, np.int32),
        BFLOAT16: (torch.int16, torch.bfloat16, np.int16),
    }
    holder, kind, signed = types[form]
    out_holder, out_kind, out_signed = types[out_form]
    on_cpu = [torch.from_numpy(bits.view(signed)).to(holder).view(kind) for bits in (x, w)]
    expected = det_gemm(*on_cpu, dtype=out_kind).view(out_holder).numpy()
    assert kernels.gemm(x, form, w, form, out_form).view(out_signed).tobytes() == expected.tobytes()
