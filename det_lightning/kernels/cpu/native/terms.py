"""Single terms of a sum, added to a long accumulator: `arithmetic.long_accumulator.add_term` and `add_product`."""

from .compiler import device_function
from .digits import add_integer, count_special, count_special_product, exponent_of, is_special, significand_of

CARRY_TERMS = 1 << 14
"""Terms between two carries (see `add_integer`)."""


@device_function
def add_term(state, b):
    """state += the value of one float32 pattern. A digit moves by less than 2^48."""
    if is_special(b):
        count_special(state, b)
    else:
        add_integer(state, significand_of(b), exponent_of(b))


@device_function
def add_product(state, a, b):
    """state += the product of two float32 patterns. A digit moves by less than 2^48."""
    if is_special(a) or is_special(b):
        count_special_product(state, a, b)
    else:
        add_integer(state, significand_of(a) * significand_of(b), exponent_of(a) + exponent_of(b))
