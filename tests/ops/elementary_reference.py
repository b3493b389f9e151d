"""Other ways to the functions of one variable: mpmath, and torch's float64 functions with a bound on their error.

The float64 functions decide almost every input at once: where their value, moved by WITHIN both ways, rounds to one float,
that is the nearest float. Only where it does not, the definition on integers is asked.
"""

import math
from fractions import Fraction

import mpmath
import torch

from det_lightning.arithmetic.elementary import FUNCTIONS
from det_lightning.arithmetic.formats import FLOAT32, Format, decode
from tests.arithmetic.nearest_float import nearest_float

WITHIN = 2.0**-45
"""Far above the error of the float64 functions of a few units of 2^-53."""

WORDS = {32: torch.int32, 16: torch.int16}


def _decay(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x.clamp(-300, 300))


def _slope(x: torch.Tensor) -> torch.Tensor:
    t = _decay(x)
    return t / (1 + t) / (1 + t)


def _silu_derivative(x: torch.Tensor) -> torch.Tensor:
    t = _decay(x)
    return (1 + x * (t / (1 + t))) / (1 + t)


def _tail(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi(-|x|) and phi(x), far out those of 30."""
    a = x.abs().clamp(max=30)
    decay = torch.exp(-a * a / 2)
    return torch.special.erfcx(a / math.sqrt(2)) * decay / 2, decay / math.sqrt(2 * math.pi)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    tail, _ = _tail(x)
    return torch.where(x <= 0, x * tail, x - x * tail)


def _gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    tail, density = _tail(x)
    inner = x.clamp(-30, 30) * density
    return torch.where(x < 0, tail + inner, 1 - (tail - inner))


REFERENCES = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "gelu": _gelu,
    "gelu_derivative": _gelu_derivative,
    "log": torch.log,
    "log1p": torch.log1p,
    "log1p_derivative": lambda x: 1 / (1 + x),
    "reciprocal": lambda x: 1 / x,
    "reciprocal_derivative": lambda x: -1 / (x * x),
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "rsqrt_derivative": lambda x: -0.5 * (1 / torch.sqrt(x)) ** 3,
    "sigmoid": lambda x: 1 / (1 + _decay(x)),
    "sigmoid_derivative": _slope,
    "silu": lambda x: x / (1 + _decay(x)),
    "silu_derivative": _silu_derivative,
    "softplus": lambda x: x.clamp(min=0) + torch.log1p(_decay(x.abs())),
    "sqrt": torch.sqrt,
    "sqrt_derivative": lambda x: 0.5 / torch.sqrt(x),
    "tanh": torch.tanh,
    "tanh_derivative": lambda x: 4 * _slope(2 * x),
}
"""Each function of finite float64 numbers, off by a few units of 2^-53."""


def _size(name: str, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the error of a reference is relative to: its value, or the terms that cancel in it."""
    if name == "silu_derivative":
        return torch.sigmoid(x) * (2 + x.abs())
    if name == "gelu_derivative":
        tail, density = _tail(x)
        return 8 * torch.where(x < 0, tail + x.abs().clamp(max=30) * density, 1.0)
    return 8 * value.abs() if name == "gelu" else value.abs()  # erfcx is off by a few units more


def rounded(z: torch.Tensor, form: Format) -> torch.Tensor:
    """The patterns of the nearest floats to float64 numbers that are no ties, as integers; one NaN."""
    if form == FLOAT32:
        bits = z.float().view(torch.int32)
        return torch.where(z.isnan(), FLOAT32.nan_bits, bits)
    # In units of the last place: 2^(exponent - fraction bits), never below the smallest subnormal.
    exponent = torch.frexp(z).exponent.long() - form.significand_bits
    last_place = torch.where(z == 0, form.lowest_exponent, exponent.clamp(min=form.lowest_exponent))
    scale = ((1023 - last_place) << 52).view(torch.float64)
    steps = torch.round(z.abs() * scale).long()
    bits = ((last_place - form.lowest_exponent) << form.fraction_bits) + steps
    bits = torch.where(z.isinf(), form.infinity_bits, bits.clamp(0, form.infinity_bits))
    bits = bits | torch.where(torch.signbit(z), form.sign_bit, 0)
    return torch.where(z.isnan(), form.nan_bits, bits).to(torch.int16)


def bracket(name: str, x: torch.Tensor, form: Format, within: float = WITHIN) -> tuple[torch.Tensor, torch.Tensor]:
    """Patterns of the reference of float tensor x, moved down and up by `within`."""
    x = x.double()
    value = REFERENCES[name](x)
    slack = torch.where(value.isfinite(), _size(name, x, value) * within, 0.0)
    below, above = value - slack, value + slack
    if name in ("gelu", "silu"):
        # Tiny numbers come out as x / 2 and less than 2^-53 of it more: above it, and below the next float64, between which
        # lies no tie. Half of the subnormals would be near one.
        tiny = (x.abs() < 2.0**-60) & (x != 0)
        beside = torch.nextafter(x / 2, torch.full_like(x, math.inf))
        below, above = torch.where(tiny, beside, below), torch.where(tiny, beside, above)
    return rounded(below, form), rounded(above, form)


def defined(name: str, x: torch.Tensor, form: Format = FLOAT32) -> torch.Tensor:
    """Patterns of the definition at a float tensor, on the CPU."""
    patterns = [p & 0xFFFFFFFF for p in x.float().view(torch.int32).flatten().tolist()]
    bits = torch.tensor([FUNCTIONS[name](p, FLOAT32, form) for p in patterns], dtype=torch.int64)
    return bits.to(WORDS[form.bits]).view(x.shape)


def near_ties(name: str, x: torch.Tensor, form: Format = FLOAT32, within: float = WITHIN) -> torch.Tensor:
    """The numbers of x whose exact result lies within `within` of a tie, infinities and some zeros beside them."""
    below, above = bracket(name, x, form, within)
    return x[(below != above) | x.isinf()]


def count_faults(name: str, x: torch.Tensor, result: torch.Tensor, form: Format = FLOAT32) -> tuple[int, int]:
    """(results that are not the nearest float, inputs for which the definition was asked); on the device of x."""
    x, bits = x.flatten(), result.flatten().view(WORDS[form.bits])
    if form == FLOAT32:
        # Most results are what both ends of the bracket round to, and need no closer look.
        wide = x.double()
        value = REFERENCES[name](wide)
        slack = _size(name, wide, value) * WITHIN
        ends = [(value - slack).float().view(torch.int32), (value + slack).float().view(torch.int32)]
        clear = (ends[0] == bits) & (ends[1] == bits) | value.isnan() & (bits == FLOAT32.nan_bits)
        places = (~clear).nonzero().flatten()
        x, bits = x[places], bits[places]
    below, above = bracket(name, x, form)
    asked = (below != above) | x.isinf()
    faults = int(((bits != below) & ~asked).sum())
    expected = defined(name, x[asked].cpu(), form).to(bits.device)
    return faults + int((bits[asked] != expected).sum()), len(expected)


_MP = {
    "exp": mpmath.exp,
    "expm1": mpmath.expm1,
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_derivative": lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2 + x * mpmath.npdf(x),
    "log": mpmath.log,
    "log1p": lambda x: mpmath.log(1 + x),
    "log1p_derivative": lambda x: 1 / (1 + x),
    "reciprocal": lambda x: 1 / x,
    "reciprocal_derivative": lambda x: -1 / x**2,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "rsqrt_derivative": lambda x: -1 / (2 * x * mpmath.sqrt(x)),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "sigmoid_derivative": lambda x: 1 / (4 * mpmath.cosh(x / 2) ** 2),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "silu_derivative": lambda x: (1 + mpmath.exp(-x) * (1 + x)) / (1 + mpmath.exp(-x)) ** 2,
    "softplus": lambda x: mpmath.log(1 + mpmath.exp(x)),
    "sqrt": mpmath.sqrt,
    "sqrt_derivative": lambda x: 1 / (2 * mpmath.sqrt(x)),
    "tanh": mpmath.tanh,
    "tanh_derivative": lambda x: 1 / mpmath.cosh(x) ** 2,
}


def by_mpmath(name: str, bits: int, form: Format = FLOAT32, out: Format | None = None) -> int | None:
    """Bits of the nearest float at a finite pattern by mpmath at 1000 bits; None where the function has no number there."""
    significand, exponent = decode(bits, form)
    with mpmath.workprec(1000):
        x = mpmath.ldexp(significand, exponent)
        try:
            value = mpmath.mpmathify(_MP[name](x))
        except (ZeroDivisionError, ValueError):
            return None
        if isinstance(value, mpmath.mpc) or not mpmath.isfinite(value):
            return None
        sign, man, exp, _ = value._mpf_
    exp = max(-3000, min(exp, 3000))  # beyond every format, and short enough for a fraction
    return nearest_float((-1) ** sign * Fraction(int(man)) * Fraction(2) ** exp, form if out is None else out)
