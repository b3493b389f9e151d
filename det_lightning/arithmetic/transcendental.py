"""The transcendental functions of one variable in fixed point, to any number of bits.

`f(value, exponent, precision)` is (n, place): f(value * 2^exponent) = n * 2^place, n within 2^GUARD_BITS. Requires: an
argument below 128 in magnitude, 16 for the normal distribution.
"""

from .fixed_point import exp_fixed, log_fixed, normal_fixed


def exp(value: int, exponent: int, precision: int) -> tuple[int, int]:
    n, k = exp_fixed(value, exponent, precision)
    return n, k - precision


def expm1(value: int, exponent: int, precision: int) -> tuple[int, int]:
    n, k = exp_fixed(value, exponent, precision)
    one = 1 << precision
    return (n - (one >> k), k - precision) if k >= 0 else ((n >> -k) - one, -precision)


def _decay(value: int, exponent: int, precision: int) -> tuple[int, int, int]:
    """t = e^-|x| as (n, k), t = n * 2^(k - precision), and (1 + t) * 2^precision."""
    n, k = exp_fixed(-abs(value), exponent, precision)
    return n, k, (1 << precision) + (n >> -k)


def sigmoid(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """1 / (1 + t) or t / (1 + t)."""
    n, k, one_more = _decay(value, exponent, precision)
    if value < 0:
        return (n << precision) // one_more, k - precision
    return (1 << 2 * precision) // one_more, -precision


def sigmoid_derivative(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """t / (1 + t)^2."""
    n, k, one_more = _decay(value, exponent, precision)
    return (n << 2 * precision) // one_more**2, k - precision


def tanh(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """±(1 - t^2) / (1 + t^2)."""
    n, k, one_more = _decay(value, exponent + 1, precision)
    quotient = (((1 << precision) - (n >> -k)) << precision) // one_more
    return -quotient if value < 0 else quotient, -precision


def tanh_derivative(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """4 t^2 / (1 + t^2)^2."""
    n, place = sigmoid_derivative(value, exponent + 1, precision)
    return n, place + 2


def softplus(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """max(x, 0) + ln(1 + t)."""
    _, _, one_more = _decay(value, exponent, precision)
    shift = exponent + precision
    x = max(value, 0)
    return log_fixed(one_more, -precision, precision) + (x << shift if shift >= 0 else x >> -shift), -precision


def silu(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """x sigmoid(x)."""
    n, place = sigmoid(value, exponent, precision)
    length = value.bit_length()
    return n * value >> length, place + exponent + length


def silu_derivative(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """sigmoid(x) + x sigmoid'(x), absolute: it passes zero near -1.278. |x| < 2^7 leaves the error below 2^GUARD_BITS."""
    n, place = sigmoid(value, exponent, precision)
    slope, slope_place = sigmoid_derivative(value, exponent, precision)
    shift = exponent + slope_place + precision
    product = value * slope
    return (n >> -(place + precision)) + (product << shift if shift >= 0 else product >> -shift), -precision


def gelu(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """x Phi(x)."""
    below, _ = normal_fixed(value, exponent, precision)
    length = value.bit_length()
    return below * value >> length, exponent + length - precision


def gelu_derivative(value: int, exponent: int, precision: int) -> tuple[int, int]:
    """Phi(x) + x phi(x), absolute: it passes zero near -0.7518. |x| < 2^4 leaves the error below 2^GUARD_BITS."""
    below, density = normal_fixed(value, exponent, precision)
    product = density * value
    return below + (product << exponent if exponent >= 0 else product >> -exponent), -precision
