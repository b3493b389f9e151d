"""The functions of one variable as pairs of float64, off by less than 2^-72 of the value: `arithmetic.elementary`.

They decide where the short evaluation (`elementary_short`) lies too close to a tie. A root or a quotient that is exact
has a low part of zero; every other value has the right sign beside any float.
"""

from fractions import Fraction
from math import factorial, isqrt

import numpy as np

from ....arithmetic.fixed_point import pi_fixed
from . import elementary_short as short
from .compiler import device_function
from .double_double import add, divide, fast_two_sum, multiply, two_product, two_sum
from .elementary_short import INVERSE_ROOT_2_PI, LN2_HEAD, LN2_MIDDLE, LN2_TAIL, LOG2_E, ROUND, clamp
from .integers import float_from_pattern
from .vectors import square_root

DEGREE = 22
SERIES_TERMS, FRACTION_TERMS = 75, 130


def _pair(value: Fraction) -> tuple[float, float]:
    high = value.numerator / value.denominator
    return high, float(value - Fraction(high))


_INVERSE_ROOT_2_PI_LOW = float(1 / Fraction(isqrt(pi_fixed(300) << 301), 1 << 300) - Fraction(INVERSE_ROOT_2_PI))
_TERMS = np.array([_pair(Fraction(1, factorial(n))) for n in range(DEGREE + 1)])


@device_function
def expm1_of_rest(y):
    """(e^r - 1 as a pair, 2^k) with y = k ln 2 + r, |r| <= ln 2 / 2. Requires: |y| <= 700."""
    steps = (y * LOG2_E + ROUND) - ROUND
    r, error = two_sum(y, -(steps * LN2_HEAD))
    product, product_error = two_product(steps, LN2_MIDDLE)
    r, r_low = add(r, error, -product, -product_error)
    r, r_low = fast_two_sum(r, r_low - steps * LN2_TAIL)
    high, low = _TERMS[DEGREE, 0], _TERMS[DEGREE, 1]
    for back in range(DEGREE - 1):
        n = DEGREE - 1 - back
        high, low = multiply(high, low, r, r_low)
        high, low = add(_TERMS[n, 0], _TERMS[n, 1], high, low)
    high, low = multiply(high, low, r, r_low)
    return high, low, float_from_pattern((np.int64(steps) + 1023) << 52)


@device_function
def exp_of(y):
    high, low, scale = expm1_of_rest(y)
    high, low = add(1.0, 0.0, high, low)
    return high * scale, low * scale


@device_function
def expm1_of(y):
    high, low, scale = expm1_of_rest(y)
    more, more_low = two_sum(scale, -1.0)
    return add(more, more_low, high * scale, low * scale)


@device_function
def one_over_one_more(t, t_low):
    d, d_low = add(1.0, 0.0, t, t_low)
    return divide(1.0, 0.0, d, d_low)


@device_function
def newton(z, u, u_low):
    """z + ln(1 + u) for a tiny u: u^3 is out of sight."""
    u, u_low = add(u, u_low, -0.5 * u * u, 0.0)
    return add(z, 0.0, u, u_low)


@device_function
def log1p_of(t, t_low):
    """ln(1 + t). Requires: |t| <= 1, t > -1. One step of Newton from z: u = (1 + t) e^-z - 1."""
    z = short.log_of(1.0 + t, t)
    m, m_low = expm1_of(-z)
    u, u_low = add(m, m_low, t, t_low)
    v, v_low = multiply(m, m_low, t, t_low)
    u, u_low = add(u, u_low, v, v_low)
    return newton(z, u, u_low)


@device_function
def log_of(w, w_low):
    """ln of a pair. Requires: w > 0, normal. One step of Newton from z: u = w e^-z - 1."""
    z = short.log_of(w, w - 1.0)
    power, power_low = exp_of(-z)
    u, u_low = multiply(power, power_low, w, w_low)
    u, u_low = add(u, u_low, -1.0, 0.0)
    return newton(z, u, u_low)


@device_function
def exp(x):
    return exp_of(clamp(x))


@device_function
def expm1(x):
    return expm1_of(clamp(x))


@device_function
def normal_density(a):
    """phi(a). Requires: |a| <= 30; a^2 is exact."""
    high, low = exp_of(-0.5 * (a * a))
    return multiply(high, low, INVERSE_ROOT_2_PI, _INVERSE_ROOT_2_PI_LOW)


@device_function
def normal_tail(a):
    """Phi(-a), 0 <= a <= 30: 1/2 - phi(a) (a + a^3 / 3 + a^5 / (3 5) + ...), or phi(a) / (a + 1 / (a + 2 / (a + ...)))."""
    density, density_low = normal_density(a)
    if a < 4.0:
        square = a * a
        term, term_low, total, total_low = a, 0.0, a, 0.0
        for n in range(1, SERIES_TERMS):
            term, term_low = multiply(term, term_low, square, 0.0)
            term, term_low = divide(term, term_low, np.float64(2 * n + 1), 0.0)
            total, total_low = add(total, total_low, term, term_low)
        total, total_low = multiply(total, total_low, density, density_low)
        return add(0.5, 0.0, -total, -total_low)
    bottom, bottom_low = a, 0.0
    for back in range(FRACTION_TERMS):
        bottom, bottom_low = divide(np.float64(FRACTION_TERMS - back), 0.0, bottom, bottom_low)
        bottom, bottom_low = add(a, 0.0, bottom, bottom_low)
    return divide(density, density_low, bottom, bottom_low)


@device_function
def normal_below(x):
    """Phi(x). Requires: |x| <= 30."""
    high, low = normal_tail(abs(x))
    if x < 0.0:
        return high, low
    return add(1.0, 0.0, -high, -low)


@device_function
def gelu(x):
    high, low = normal_below(x if abs(x) < 30.0 else (30.0 if x > 0.0 else -30.0))
    return multiply(high, low, x, 0.0)


@device_function
def gelu_derivative(x):
    y = x if abs(x) < 30.0 else (30.0 if x > 0.0 else -30.0)
    high, low = normal_below(y)
    density, density_low = normal_density(y)
    density, density_low = multiply(density, density_low, y, 0.0)
    return add(high, low, density, density_low)


@device_function
def log(x):
    return log_of(x, 0.0)


@device_function
def log1p(x):
    if x > 1.0:
        w, w_low = two_sum(1.0, x)
        return log_of(w, w_low)
    return log1p_of(x, 0.0)


@device_function
def log1p_derivative(x):
    w, w_low = two_sum(1.0, x)
    return divide(1.0, 0.0, w, w_low)


@device_function
def reciprocal(x):
    return divide(1.0, 0.0, x, 0.0)


@device_function
def reciprocal_derivative(x):
    return divide(-1.0, 0.0, x * x, 0.0)


@device_function
def rsqrt(x):
    """y (1 + u / 2) with u = 1 - x y^2, which is tiny."""
    y = 1.0 / square_root(x)
    square, square_low = two_product(y, y)
    product, product_low = multiply(square, square_low, x, 0.0)
    u, _ = add(1.0, 0.0, -product, -product_low)
    return fast_two_sum(y, 0.5 * y * u)


@device_function
def rsqrt_derivative(x):
    high, low = rsqrt(x)
    inverse, inverse_low = divide(-0.5, 0.0, x, 0.0)
    return multiply(high, low, inverse, inverse_low)


@device_function
def sigmoid(x):
    t, t_low = exp_of(-abs(clamp(x)))
    d, d_low = add(1.0, 0.0, t, t_low)
    if x < 0.0:
        return divide(t, t_low, d, d_low)
    return divide(1.0, 0.0, d, d_low)


@device_function
def logistic_slope(y):
    """t / (1 + t)^2 with t = e^-|y|."""
    t, t_low = exp_of(-abs(y))
    d, d_low = one_over_one_more(t, t_low)
    t, t_low = multiply(t, t_low, d, d_low)
    return multiply(t, t_low, d, d_low)


@device_function
def sigmoid_derivative(x):
    return logistic_slope(clamp(x))


@device_function
def silu(x):
    high, low = sigmoid(x)
    return multiply(high, low, x, 0.0)


@device_function
def silu_derivative(x):
    high, low = sigmoid(x)
    slope, slope_low = logistic_slope(clamp(x))
    slope, slope_low = multiply(slope, slope_low, x, 0.0)
    return add(high, low, slope, slope_low)


@device_function
def softplus(x):
    t, t_low = exp_of(-abs(clamp(x)))
    high, low = log1p_of(t, t_low)
    return add(x if x > 0.0 else 0.0, 0.0, high, low)


@device_function
def sqrt(x):
    root = square_root(x)
    square, square_low = two_product(root, root)
    return fast_two_sum(root, ((x - square) - square_low) / (root + root))


@device_function
def sqrt_derivative(x):
    high, low = rsqrt(x)
    return 0.5 * high, 0.5 * low


@device_function
def tanh(x):
    if abs(x) < 2.0**-10:
        # x - x^3/3 + 2 x^5/15 - ...: what follows x has 52 bits, and its sign is right for the smallest x.
        q = x * x
        series = -1.0 / 3.0 + q * (2.0 / 15.0 - q * (17.0 / 315.0 - q * (62.0 / 2835.0)))
        return fast_two_sum(x, x * q * series)
    m, m_low = expm1_of(2.0 * abs(clamp(x)))
    d, d_low = add(m, m_low, 2.0, 0.0)
    high, low = divide(m, m_low, d, d_low)
    if x < 0.0:
        return -high, -low
    return high, low


@device_function
def tanh_derivative(x):
    high, low = logistic_slope(2.0 * clamp(x))
    return 4.0 * high, 4.0 * low
