"""Pairs of float64 that act as one number of about 106 bits (after Dekker, 1971, and Knuth).

Only +, -, * of IEEE float64, each rounded once, in the order written: no fused operation and no library call, so the
bits are the same on every processor. A pair (high, low) stands for high + low, with |low| <= ulp(high) / 2.
"""

from .compiler import device_function

_SPLITTER = 134217729.0
"""2^27 + 1 cuts a float64 into two halves of at most 26 bits (Veltkamp)."""


@device_function
def two_sum(a, b):
    """a + b exactly, as a rounded sum and its error."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


@device_function
def fast_two_sum(a, b):
    """a + b exactly. Requires: |a| >= |b| or a = 0."""
    total = a + b
    return total, b - (total - a)


@device_function
def two_product(a, b):
    """a * b exactly, as a rounded product and its error. Requires: no overflow, no subnormal part."""
    product = a * b
    wide = _SPLITTER * a
    a_high = wide - (wide - a)
    a_low = a - a_high
    wide = _SPLITTER * b
    b_high = wide - (wide - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@device_function
def add(a_high, a_low, b_high, b_low):
    """The sum of two pairs, within 2^-104 of the larger operand."""
    high, error = two_sum(a_high, b_high)
    low, low_error = two_sum(a_low, b_low)
    high, error = fast_two_sum(high, error + low)
    return fast_two_sum(high, error + low_error)


@device_function
def multiply(a_high, a_low, b_high, b_low):
    """The product of two pairs, within 2^-102 of it."""
    high, error = two_product(a_high, b_high)
    return fast_two_sum(high, error + (a_high * b_low + a_low * b_high))


@device_function
def divide(a_high, a_low, b_high, b_low):
    """The quotient of two pairs, within 2^-100 of it; its low part is zero if the high part is exact."""
    high = a_high / b_high
    product, product_low = multiply(high, 0.0, b_high, b_low)
    rest, rest_low = add(a_high, a_low, -product, -product_low)
    return fast_two_sum(high, (rest + rest_low) / b_high)
