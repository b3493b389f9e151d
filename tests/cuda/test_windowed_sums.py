"""Integers of a windowed product, as `cuda_src/` rebuilds, shifts, adds and cuts them, against Python's integers: at the
ends of what each step takes, where products of random numbers hardly come."""

import ctypes
import math
import random
from fractions import Fraction

import pytest

from det_lightning.arithmetic.windowed_digits import words_of
from det_lightning.kernels.cuda_layout import MODULI, groups_of

from . import emulator as emulation

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no g++ since 12")

WORDS = {"Narrow": 5, "Wide": 7}
PROGRAM = """
#include "grid.h"
#include "product.cuh"
#include "residue_windowed_sums.cuh"
extern "C" void rebuild(const int* sums, uint64* out) {
    int u[GROUPS];
    for (int g = 0; g < GROUPS; g++) u[g] = sums[g];
    int128 value = reconstruct(u);
    out[0] = static_cast<uint64>(value), out[1] = static_cast<uint64>(value >> 64);
}
template <class Sum>
int cut(const uint64* value, int shift, const double* products, int count, int words, int* out) {
    Sum sum;
    if (!sum.set(static_cast<int128>(static_cast<uint128>(value[1]) << 64 | value[0]), shift)) return -1;
    for (int n = 0; n < count; n++) if (!sum.add(products[n], shift)) return -1;
    int own[Sum::WORDS];
    bool fits = sum.words(own, words);
    for (int n = 0; n < Sum::WORDS; n++) out[n] = own[n];
    return fits;
}
extern "C" int Narrow(const uint64* v, int shift, const double* p, int n, int words, int* out) { return cut<struct Narrow>(v, shift, p, n, words, out); }
extern "C" int Wide(const uint64* v, int shift, const double* p, int n, int words, int* out) { return cut<class Wide>(v, shift, p, n, words, out); }
"""  # noqa: E501


@pytest.fixture(scope="module", params=[9, 12, 16])
def library(request, tmp_path_factory):
    """(the program, P)."""
    folder = tmp_path_factory.mktemp("sums")
    emulation.Emulator(folder)  # writes the sources
    loaded = emulation.build(PROGRAM, folder / "sums.so", f"-DMODULI={request.param}")
    return loaded, MODULI[: request.param]


def sums_of_groups(value: int, moduli: tuple[int, ...], by_group: bool) -> list[int]:
    """As the int8 products leave them, or (`by_group`) the float64 ones."""
    product, groups, sums = math.prod(moduli), groups_of(len(moduli)), []
    for g in range(groups):
        first, last = (n * (len(moduli) // groups) + min(n, len(moduli) % groups) for n in (g, g + 1))
        group = math.prod(moduli[first:last])
        parts = [group] if by_group else moduli[first:last]
        rests = [(value * pow(product // p, -1, p) + p // 2) % p - p // 2 for p in parts]
        sums.append(sum(rest * (group // p) for rest, p in zip(rests, parts, strict=True)))
    return sums


@pytest.mark.parametrize("by_group", [False, True])
def test_integers_up_to_31_of_64_parts_of_the_moduli(library, by_group):
    loaded, moduli = library
    product, draw = math.prod(moduli), random.Random(1)
    most = product * 31 // 64

    def rebuilt(value: int) -> int:
        sums, out = sums_of_groups(value, moduli, by_group), (ctypes.c_uint64 * 2)()
        loaded.rebuild((ctypes.c_int * len(sums))(*sums), out)
        found = out[1] << 64 | out[0]
        return found - (found >> 127 << 128)

    for value in (0, 1, -1, most, -most, *(draw.randrange(most - most // 64, most) for _ in range(200))):
        assert rebuilt(value) == value and rebuilt(-value) == -value
    assert rebuilt(product * 33 // 64) != product * 33 // 64


@pytest.mark.parametrize("kind", WORDS)
def test_words_are_those_of_the_exact_sum(library, kind):
    """Whatever is refused goes another way: a sum that is said to fit must be exact, and most must fit."""
    loaded, moduli = library
    most, draw, fitted, refused = math.prod(moduli) * 31 // 64, random.Random(2), 0, 0
    for number in range(1500):
        value = draw.choice([most, -most, 1 << draw.randrange(most.bit_length() - 1), draw.randrange(-most, most + 1)])
        value = value >> draw.choice([0, draw.randrange(96)]) << draw.choice([0, 1, 31, 32])
        value = max(-most, min(most, value))
        trailing = (value & -value).bit_length() - 1 if value else 0
        shift = draw.choice([-trailing, -trailing - 1, *range(-33, -29), *range(0, 3), *range(29, 34), 59, 60, -111])
        exponent = draw.choice([-shift, -shift, draw.randrange(-30, 70)])
        factors = [draw.choice([1, (1 << 25) - 1]) * draw.choice([-1, (1 << 25) - 1]) for _ in range(number % 4 * 3)]
        exact = Fraction(2) ** shift * (value + sum(Fraction(2) ** exponent * factor for factor in factors))
        products, words = [math.ldexp(factor, exponent) for factor in factors], draw.randrange(1, 10)
        out = (ctypes.c_int * WORDS[kind])()
        parts = (ctypes.c_uint64 * 2)(value % 2**64, value // 2**64 % 2**64)
        said = getattr(loaded, kind)(
            parts, shift, (ctypes.c_double * 9)(*products), len(products), words, out
        )  # fmt: skip
        emulation.check_faults(loaded, kind)
        refused += said != 1
        if said == 1:
            fitted += 1
            assert exact.denominator == 1
            wanted = words_of(exact.numerator, words) + [0] * WORDS[kind]
            assert list(out) == wanted[: WORDS[kind]] and not any(wanted[WORDS[kind] :])
    assert fitted > 80 and refused > 200
