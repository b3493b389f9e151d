"""Numbers that `cuda_src/` holds as literals, computed again; no GPU needed."""

import re
from fractions import Fraction
from math import factorial, gcd

import mpmath
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic import normal_tail  # noqa: E402
from det_lightning.arithmetic.fixed_point import log_of_2  # noqa: E402
from det_lightning.kernels import cuda_compile, cuda_layout  # noqa: E402

LN2 = Fraction(log_of_2(300), 1 << 300)
HEX = r"-?0x[0-9a-f.]+p[+-]\d+"


def text(name: str) -> str:
    return (cuda_compile.SOURCE_FOLDER / name).read_text(encoding="utf-8")


def constant(name: str) -> Fraction:
    return Fraction(float.fromhex(re.search(rf"{name} = ({HEX})", text("elementary_constants.cuh"))[1]))


def test_ln_2_in_three_parts():
    head, middle, tail = (constant(f"LN2_{part}") for part in ("HEAD", "MIDDLE", "TAIL"))
    assert head == Fraction(int(LN2 * 2**42), 2**42)
    assert middle == Fraction(float(LN2 - head)) and tail == Fraction(float(LN2 - head - middle))
    assert constant("LOG2_E") == Fraction(float(1 / LN2))


def test_reciprocal_factorials_as_pairs():
    pairs = re.findall(rf"\{{({HEX}), ({HEX})\}},  // 1 / (\d+)!", text("elementary_constants.cuh"))
    assert [int(n) for *_, n in pairs] == list(range(23))
    for high, low, n in pairs:
        exact = Fraction(1, factorial(int(n)))
        assert float.fromhex(high) == float(exact)
        assert float.fromhex(low) == float(exact - Fraction(float(exact)))


def test_the_normal_tails_polynomial_is_the_cpus_and_close_to_the_function():
    listed = re.search(r"TAIL_TERMS\[TAIL_DEGREE \+ 1\] = \{([^}]*)\}", text("elementary_constants.cuh"))[1]
    assert tuple(float.fromhex(term) for term in listed.split(",")) == normal_tail.TERMS
    with mpmath.workprec(200):
        for a in (mpmath.mpf(n) / 16 for n in range(0, 320)):
            t = (a - normal_tail.CENTER) / (a + normal_tail.CENTER)
            exact = mpmath.erfc(a / mpmath.sqrt(2)) / 2 * mpmath.exp(a * a / 2)
            assert abs(mpmath.polyval(normal_tail.TERMS[::-1], t) / (1 + a) / exact - 1) < 2.0**-53
        high, low = constant("INVERSE_ROOT_2_PI"), constant("INVERSE_ROOT_2_PI_LOW")
        value = 1 / mpmath.sqrt(2 * mpmath.pi)
        assert float(value) == float(high) and float(value - float(high)) == float(low)


def test_the_moduli_are_the_same_everywhere_and_pairwise_coprime():
    listed = re.search(r"list\[MAXIMUM_MODULI\] = \{([^}]*)\}", text("residue.cuh"))[1]
    assert tuple(int(p) for p in listed.split(",")) == cuda_layout.MODULI
    low, high = (int(word, 16) for word in re.findall(r"= (0x[0-9a-f]{16})ull", text("residue_gemm.cuh")))
    packed = [(low | high << 64) >> 8 * i & 0xFF for i in range(16)]
    assert [p or 256 for p in packed] == list(cuda_layout.MODULI)
    assert all(gcd(p, q) == 1 for i, p in enumerate(cuda_layout.MODULI) for q in cuda_layout.MODULI[:i])
