"""The oracle of all rounding tests: the nearest float of a fraction, found by comparing fractions.

It shares nothing with `arithmetic.rounding`: it searches the patterns of the format, which rise with their values.
"""

from fractions import Fraction

from det_lightning.arithmetic.formats import Format


def value_of(bits: int, form: Format) -> Fraction:
    """The value of a non-negative finite pattern, or of the pattern behind the largest: 2^top_exponent."""
    field, fraction = bits >> form.fraction_bits, bits & ((1 << form.fraction_bits) - 1)
    if field == 0:
        return Fraction(fraction) * Fraction(2) ** form.lowest_exponent
    return Fraction((1 << form.fraction_bits) + fraction) * Fraction(2) ** (form.lowest_exponent + field - 1)


def nearest_float(value: Fraction, form: Format) -> int:
    """Bits of the float of `form` nearest to `value`, ties to the even pattern; 0 for 0."""
    if value == 0:
        return 0
    sign, value = (form.sign_bit, -value) if value < 0 else (0, value)
    low, high = 0, form.infinity_bits
    if value >= value_of(high, form):
        return sign | high
    # Ensures: value_of(low) <= value < value_of(high).
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value_of(middle, form) <= value else (low, middle)
    below, above = value - value_of(low, form), value_of(high, form) - value
    if below == above:
        return sign | (low if low % 2 == 0 else high)
    return sign | (low if below < above else high)
