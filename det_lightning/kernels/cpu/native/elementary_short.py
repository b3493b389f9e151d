"""The functions of one variable in float64, off by less than 2^-48 of the value: `arithmetic.elementary`.

Straight lines without a branch or a table, so that a compiler works on eight elements at a time. Arguments are float32
values of a normal magnitude. Exponentials of |x| above 300 are those of 300: no format tells them apart.
"""

from fractions import Fraction
from math import factorial, isqrt

from ....arithmetic.fixed_point import log_of_2, pi_fixed
from ....arithmetic.normal_tail import CENTER, TERMS
from .compiler import device_function
from .integers import float_from_pattern, pattern_of_float
from .vectors import square_root

_LN2 = Fraction(log_of_2(256), 1 << 256)
# ln 2 in three parts: k * head is exact for |k| < 2^11, because the head has 42 bits.
LN2_HEAD = float(Fraction(int(_LN2 * 2**42), 2**42))
LN2_MIDDLE = float(_LN2 - Fraction(LN2_HEAD))
LN2_TAIL = float(_LN2 - Fraction(LN2_HEAD) - Fraction(LN2_MIDDLE))
LOG2_E = float(1 / _LN2)
ROUND = 1.5 * 2.0**52
"""Adding and subtracting it rounds a float64 to an integer, whose low bits are those of the sum."""

_ROUND_PATTERN = 0x4338 << 48
_BIAS = 1023 << 52
_ROOT_HALF = 0x3FE6A09E << 32
"""The pattern of sqrt(1 / 2), nearly."""

INVERSE_ROOT_2_PI = float(1 / Fraction(isqrt(pi_fixed(300) << 301), 1 << 300))

_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13 = (1.0 / factorial(n) for n in range(2, 14))
_L3, _L5, _L7, _L9, _L11, _L13, _L15, _L17, _L19, _L21, _L23 = (2.0 / n for n in range(3, 24, 2))

(
    _T0,
    _T1,
    _T2,
    _T3,
    _T4,
    _T5,
    _T6,
    _T7,
    _T8,
    _T9,
    _T10,
    _T11,
    _T12,
    _T13,
    _T14,
    _T15,
    _T16,
    _T17,
    _T18,
    _T19,
    _T20,
    _T21,
    _T22,
) = TERMS


@device_function
def clamp(x):
    """x, moved into [-300, 300]."""
    x = x if x < 300.0 else 300.0
    return x if x > -300.0 else -300.0


@device_function
def expm1_of_rest(y):
    """(e^r - 1, 2^k) with y = k ln 2 + r, |r| <= ln 2 / 2. Requires: |y| <= 700."""
    shifted = y * LOG2_E + ROUND
    steps = shifted - ROUND
    r = (y - steps * LN2_HEAD) - steps * LN2_MIDDLE
    s = _C13 * r + _C12
    s = s * r + _C11
    s = s * r + _C10
    s = s * r + _C9
    s = s * r + _C8
    s = s * r + _C7
    s = s * r + _C6
    s = s * r + _C5
    s = s * r + _C4
    s = s * r + _C3
    s = s * r + _C2
    return r + r * r * s, float_from_pattern((pattern_of_float(shifted) << 52) + _BIAS)


@device_function
def exp_of(y):
    p, scale = expm1_of_rest(y)
    return (1.0 + p) * scale


@device_function
def expm1_of(y):
    p, scale = expm1_of_rest(y)
    return p * scale + (scale - 1.0)


@device_function
def log_of(w, below):
    """ln w, or ln(1 + below) with w = 1 + below rounded, exact in `below` where w is near 1. Requires: w > 0, normal."""
    # w = m 2^e with m in [0.7071, 1.4142): near 1, e = 0 and nothing cancels.
    pattern = pattern_of_float(w)
    e = (pattern - _ROOT_HALF) >> 52
    m = float_from_pattern(pattern - (e << 52))
    below = below if e == 0 else m - 1.0
    # ln m = 2 atanh(s) = 2 s + s^3 (2/3 + 2/5 s^2 + ...), s = (m - 1) / (m + 1), |s| < 0.1716.
    s = below / (m + 1.0)
    q = s * s
    t = _L23 * q + _L21
    t = t * q + _L19
    t = t * q + _L17
    t = t * q + _L15
    t = t * q + _L13
    t = t * q + _L11
    t = t * q + _L9
    t = t * q + _L7
    t = t * q + _L5
    t = t * q + _L3
    steps = float_from_pattern(e + _ROUND_PATTERN) - ROUND
    return steps * LN2_HEAD + (steps * LN2_MIDDLE + ((s + s) + s * q * t))


@device_function
def exp(x):
    return exp_of(clamp(x))


@device_function
def expm1(x):
    return expm1_of(clamp(x))


@device_function
def normal_tail(a):
    """(Phi(-a) e^(a^2 / 2), e^(-a^2 / 2)). Requires: 0 <= a <= 30; within the bound to 20. a^2 is exact."""
    t = (a - CENTER) / (a + CENTER)
    p = _T22 * t + _T21
    p = p * t + _T20
    p = p * t + _T19
    p = p * t + _T18
    p = p * t + _T17
    p = p * t + _T16
    p = p * t + _T15
    p = p * t + _T14
    p = p * t + _T13
    p = p * t + _T12
    p = p * t + _T11
    p = p * t + _T10
    p = p * t + _T9
    p = p * t + _T8
    p = p * t + _T7
    p = p * t + _T6
    p = p * t + _T5
    p = p * t + _T4
    p = p * t + _T3
    p = p * t + _T2
    p = p * t + _T1
    p = p * t + _T0
    return p / (1.0 + a), exp_of(-0.5 * (a * a))


@device_function
def gelu(x):
    a = abs(x) if abs(x) < 30.0 else 30.0
    ratio, decay = normal_tail(a)
    tail = x * (ratio * decay)
    return tail if x < 0.0 else x - tail


@device_function
def gelu_derivative(x):
    """e^(-a^2 / 2) (Phi(-a) e^(a^2 / 2) - a / sqrt(2 pi)), a = |x|, or one less that; 0 where more than ten bits cancel."""
    a = abs(x) if abs(x) < 30.0 else 30.0
    ratio, decay = normal_tail(a)
    factor = ratio - a * INVERSE_ROOT_2_PI
    slope = decay * factor if abs(factor) > 2.0**-10 else 0.0
    return slope if x < 0.0 else 1.0 - decay * factor


@device_function
def log(x):
    return log_of(x, x - 1.0)


@device_function
def log1p(x):
    return log_of(1.0 + x, x)


@device_function
def log1p_derivative(x):
    return 1.0 / (1.0 + x)


@device_function
def reciprocal(x):
    return 1.0 / x


@device_function
def reciprocal_derivative(x):
    return -1.0 / (x * x)


@device_function
def rsqrt(x):
    return 1.0 / square_root(x)


@device_function
def rsqrt_derivative(x):
    return -0.5 / (x * square_root(x))


@device_function
def sigmoid(x):
    return 1.0 / (1.0 + exp_of(-clamp(x)))


@device_function
def sigmoid_derivative(x):
    t = exp_of(-clamp(x))
    y = 1.0 / (1.0 + t)
    return t * y * y


@device_function
def silu(x):
    return x / (1.0 + exp_of(-clamp(x)))


@device_function
def silu_derivative(x):
    """sigmoid(x) (1 + x e^-x sigmoid(x)), or 0 where more than ten bits cancel."""
    t = exp_of(-clamp(x))
    y = 1.0 / (1.0 + t)
    factor = 1.0 + x * (t * y)
    return y * factor if abs(factor) > 2.0**-10 else 0.0


@device_function
def softplus(x):
    t = exp_of(-abs(clamp(x)))
    return (x if x > 0.0 else 0.0) + log_of(1.0 + t, t)


@device_function
def sqrt(x):
    return square_root(x)


@device_function
def sqrt_derivative(x):
    return 0.5 / square_root(x)


@device_function
def tanh(x):
    m = expm1_of(2.0 * clamp(x))
    return m / (m + 2.0)


@device_function
def tanh_derivative(x):
    t = exp_of(-2.0 * clamp(x))
    y = 1.0 / (1.0 + t)
    return 4.0 * (t * y * y)
