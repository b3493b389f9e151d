"""Functions of one variable, correctly rounded: the definition, on Python integers.

`FUNCTIONS[name](bits, form, out)` is the value of a pattern of `form` as the nearest float of `out`. Roots and quotients
are rounded from their exact integers (`algebraic`). The others (`transcendental`) are bracketed in fixed point with more
and more bits until both ends of the bracket round alike (Ziv). It ends, because their values at binary numbers are never
a tie, apart from those at zero.
"""

from collections.abc import Callable

from . import algebraic, transcendental
from .fixed_point import GUARD_BITS, log_fixed
from .formats import FLOAT32, Format, decode, is_infinity, is_nan
from .rounding import round_integer

Constant = Callable[[Format], int]


def _number(value: int) -> Constant:
    return lambda form: round_integer(value, 0, form)


def _minus_zero(form: Format) -> int:
    return form.sign_bit


def _infinity(form: Format) -> int:
    return form.infinity_bits


def _minus_infinity(form: Format) -> int:
    return form.infinity_bits | form.sign_bit


def _nan(form: Format) -> int:
    return form.nan_bits


_ZERO = _number(0)
_SIGNED_ZEROS = (_ZERO, _minus_zero)
_SIGNED_INFINITIES = (_infinity, _minus_infinity)


class Function:
    """A function of one variable: its limits at the infinities, its values at +0 and -0, and the rest."""

    def __init__(
        self,
        inside: Callable[[int, int, Format], int],
        at_minus_infinity: Constant,
        at_infinity: Constant,
        at_zeros: tuple[Constant, Constant] | None = None,
    ):
        """`inside(significand, exponent, out)` are the bits at significand * 2^exponent, a zero only without `at_zeros`."""
        self._inside, self._at_zeros = inside, at_zeros
        self._at_infinities = (at_infinity, at_minus_infinity)

    def __call__(self, bits: int, form: Format = FLOAT32, out: Format | None = None) -> int:
        """Bits of the function of a pattern of `form`, rounded once to `out` (None: `form`); NaNs are canonical."""
        out = form if out is None else out
        if is_nan(bits, form):
            return out.nan_bits
        negative = bits & form.sign_bit != 0
        if is_infinity(bits, form):
            return self._at_infinities[negative](out)
        significand, exponent = decode(bits, form)
        if significand == 0 and self._at_zeros is not None:
            return self._at_zeros[negative](out)
        return self._inside(significand, exponent, out)


def _round_bracketed(approximate: Callable[[int], tuple[int, int]], out: Format) -> int:
    """Round a function of the precision, `approximate(precision) -> (n, exponent)`, n within 2^GUARD_BITS."""
    precision = 128
    while True:
        n, exponent = approximate(precision)
        error = 1 << GUARD_BITS
        low, high = round_integer(n - error, exponent, out), round_integer(n + error, exponent, out)
        if low == high:
            return low
        precision *= 2


def _beside(value: int, exponent: int, side: int, out: Format) -> int:
    """The rounding of value * 2^exponent moved up (side 1) or down (-1) by less than any format can tell."""
    return round_integer((value << 256) + side, exponent - 256, out)


def _bracketed(
    approximate: Callable[[int, int, int], tuple[int, int]],
    far_below: Callable[[int, int, Format], int],
    far_above: Callable[[int, int, Format], int],
    far: int = 128,
) -> Callable[[int, int, Format], int]:
    """From `approximate(significand, exponent, precision)` for |x| < far, and what is so for x <= -far and x >= far.

    There, e^-128 < 2^-184, or the normal distribution's tail, is out of sight beside any float but zero.
    """

    def inside(significand: int, exponent: int, out: Format) -> int:
        if abs(significand) << max(exponent, 0) >> max(-exponent, 0) >= far:
            return (far_below if significand < 0 else far_above)(significand, exponent, out)
        return _round_bracketed(lambda precision: approximate(significand, exponent, precision), out)

    return inside


def _tiny(value: int, exponent: int, out: Format) -> int:
    return _beside(0, -256, 1, out)


def _minus_tiny(value: int, exponent: int, out: Format) -> int:
    return _beside(0, -256, -1, out)


def _overflow(value: int, exponent: int, out: Format) -> int:
    return out.infinity_bits


def _log(value: int, exponent: int, out: Format) -> int:
    if value < 0:
        return out.nan_bits
    if value << exponent == 1 if exponent >= 0 else value == 1 << -exponent:
        return 0
    return _round_bracketed(lambda precision: (log_fixed(value, exponent, precision), -precision), out)


def _log1p(value: int, exponent: int, out: Format) -> int:
    one_more, place = algebraic.one_more(value, exponent)
    if one_more == 0:
        return _minus_infinity(out)
    return _log(one_more, place, out)


exp = Function(_bracketed(transcendental.exp, _tiny, _overflow), _ZERO, _infinity)
expm1 = Function(
    _bracketed(transcendental.expm1, lambda value, exponent, out: _beside(-1, 0, 1, out), _overflow),
    _number(-1), _infinity, _SIGNED_ZEROS,
)  # fmt: skip
log = Function(_log, _nan, _infinity, (_minus_infinity, _minus_infinity))
log1p = Function(_log1p, _nan, _infinity, _SIGNED_ZEROS)
sigmoid = Function(
    _bracketed(transcendental.sigmoid, _tiny, lambda value, exponent, out: _beside(1, 0, -1, out)), _ZERO, _number(1)
)  # fmt: skip
tanh = Function(
    _bracketed(transcendental.tanh, lambda v, e, out: _beside(-1, 0, 1, out), lambda v, e, out: _beside(1, 0, -1, out)),
    _number(-1), _number(1), _SIGNED_ZEROS,
)  # fmt: skip
softplus = Function(
    _bracketed(transcendental.softplus, _tiny, lambda value, exponent, out: _beside(value, exponent, 1, out)),
    _ZERO, _infinity,
)  # fmt: skip
silu = Function(
    _bracketed(transcendental.silu, _minus_tiny, lambda value, exponent, out: _beside(value, exponent, -1, out)),
    _minus_zero, _infinity, _SIGNED_ZEROS,
)  # fmt: skip

gelu = Function(
    _bracketed(transcendental.gelu, _minus_tiny, lambda value, exponent, out: _beside(value, exponent, -1, out), 16),
    _minus_zero, _infinity, _SIGNED_ZEROS,
)  # fmt: skip

FUNCTIONS = {
    "exp": exp,
    "expm1": expm1,
    "gelu": gelu,
    "gelu_derivative": Function(
        _bracketed(transcendental.gelu_derivative, _minus_tiny, lambda v, e, out: _beside(1, 0, 1, out), 16),
        _minus_zero,
        _number(1),
    ),
    "log": log,
    "log1p": log1p,
    "log1p_derivative": Function(algebraic.reciprocal_of_one_more, _minus_zero, _ZERO),
    "reciprocal": Function(algebraic.reciprocal, _minus_zero, _ZERO, _SIGNED_INFINITIES),
    "reciprocal_derivative": Function(
        algebraic.reciprocal_derivative, _minus_zero, _minus_zero, (_minus_infinity, _minus_infinity)
    ),
    "rsqrt": Function(algebraic.rsqrt, _nan, _ZERO, _SIGNED_INFINITIES),
    "rsqrt_derivative": Function(algebraic.rsqrt_derivative, _nan, _minus_zero, (_minus_infinity, _infinity)),
    "sigmoid": sigmoid,
    "sigmoid_derivative": Function(_bracketed(transcendental.sigmoid_derivative, _tiny, _tiny), _ZERO, _ZERO),
    "silu": silu,
    "silu_derivative": Function(
        _bracketed(transcendental.silu_derivative, _minus_tiny, lambda v, e, out: _beside(1, 0, 1, out)),
        _minus_zero,
        _number(1),
    ),
    "softplus": softplus,
    "sqrt": Function(algebraic.sqrt, _nan, _infinity, _SIGNED_ZEROS),
    "sqrt_derivative": Function(algebraic.sqrt_derivative, _nan, _ZERO, _SIGNED_INFINITIES),
    "tanh": tanh,
    "tanh_derivative": Function(_bracketed(transcendental.tanh_derivative, _tiny, _tiny), _ZERO, _ZERO),
}
"""Every function by its name; f' is `<f>_derivative` where it is not itself another of them."""

DERIVATIVES = {
    "exp": "exp",
    "expm1": "exp",
    "gelu": "gelu_derivative",
    "log": "reciprocal",
    "log1p": "log1p_derivative",
    "reciprocal": "reciprocal_derivative",
    "rsqrt": "rsqrt_derivative",
    "sigmoid": "sigmoid_derivative",
    "silu": "silu_derivative",
    "softplus": "sigmoid",
    "sqrt": "sqrt_derivative",
    "tanh": "tanh_derivative",
}
"""The name of f' for every f that has a gradient."""

EDGES = {
    "log": 0x00000000,
    "log1p": 0xBF800000,
    "log1p_derivative": 0xBF800000,
    "rsqrt": 0x00000000,
    "rsqrt_derivative": 0x00000000,
    "sqrt": 0x00000000,
    "sqrt_derivative": 0x00000000,
}
"""The float32 pattern of the number at which a function's domain ends: 0 or -1."""

DEFINED_BELOW_EDGE = {"log1p_derivative"}


def special_values(name: str, out: Format) -> tuple[int, ...]:
    """What a function of float32 is at +0, -0, +inf, -inf, its edge and NaN, as bits of `out`: the table of kernels."""
    patterns = (0, FLOAT32.sign_bit, FLOAT32.infinity_bits, FLOAT32.infinity_bits | FLOAT32.sign_bit)
    return tuple(FUNCTIONS[name](bits, FLOAT32, out) for bits in (*patterns, EDGES.get(name, 0), FLOAT32.nan_bits))
