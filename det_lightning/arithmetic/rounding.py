"""The one rounding: an exact rational number times a power of two becomes the nearest float, ties to even."""

from .formats import Format


def round_integer(value: int, exponent: int, form: Format, denominator: int = 1) -> int:
    """Bits of the float of `form` nearest to `value * 2^exponent / denominator`.

    Ties go to the even significand. Subnormals are kept. From half an ulp above the largest finite value on, the
    result is an infinity. An exact zero is +0; a negative number too small for the format is -0.
    `denominator` is at least 1.
    """
    if denominator < 1:
        raise ValueError(f"denominator is {denominator}; it must be at least 1")
    if value == 0:
        return 0
    sign = form.sign_bit if value < 0 else 0
    magnitude = abs(value)
    # Ensures: the quotient has at least significand_bits + 2 bits, so that the shift below is at least 2.
    extra = max(0, denominator.bit_length() - magnitude.bit_length() + form.significand_bits + 2)
    quotient, remainder = divmod(magnitude << extra, denominator)
    exponent -= extra

    # The result's last place: `significand_bits` below the top, but never below the smallest subnormal's.
    last_place = max(exponent + quotient.bit_length() - form.significand_bits, form.lowest_exponent)
    shift = last_place - exponent
    significand, below = quotient >> shift, quotient & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    if below > half or (below == half and (remainder or significand & 1)):
        significand += 1
    # The exponent field and the fraction are one integer: a carry out of the significand steps the exponent.
    bits = ((last_place - form.lowest_exponent) << form.fraction_bits) + significand
    return sign | min(bits, form.infinity_bits)
