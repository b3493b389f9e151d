"""The one rounding on machine integers: `arithmetic.rounding.round_integer` for digits and for 128 bits.

Formats enter as two integers, `significand_bits` and `exponent_bits`; results leave as bit patterns in an int64.
"""

from ....arithmetic.formats import (
    DIGITS,
    LOWEST_EXPONENT,
    NAN_PLACE,
    NEGATIVE_INFINITY_PLACE,
    POSITIVE_INFINITY_PLACE,
)
from .compiler import device_function
from .integers import bit_length, shift_right_logical

MASK = (1 << 32) - 1
MAGNITUDE_DIGITS = DIGITS + 2
"""32-bit digits of a magnitude: those of the accumulator, the high half of its last digit, and the sign."""


@device_function
def lowest_exponent(significand_bits, exponent_bits):
    """`Format.lowest_exponent`."""
    return 3 - (1 << (exponent_bits - 1)) - significand_bits


@device_function
def special_bits(nan, positive, negative, significand_bits, exponent_bits):
    """The canonical NaN or the infinity that these counts ask for; at least one of them is not zero."""
    infinity = ((1 << exponent_bits) - 1) << (significand_bits - 1)
    if nan != 0 or (positive != 0 and negative != 0):
        return infinity | 1 << (significand_bits - 2)
    if negative != 0:
        return infinity | 1 << (significand_bits + exponent_bits - 1)
    return infinity


@device_function
def encode(negative, significand, places, significand_bits, exponent_bits):
    """Bits of a float from its rounded significand, whose last place is `places` above the smallest subnormal's."""
    infinity = ((1 << exponent_bits) - 1) << (significand_bits - 1)
    bits = min((places << (significand_bits - 1)) + significand, infinity)
    if negative:
        bits |= 1 << (significand_bits + exponent_bits - 1)
    return bits


@device_function
def resolve_magnitude(state, magnitude):
    """Write |value of state| as 32-bit digits into `magnitude`; return whether the value is negative.

    Accepts every int64 digit. Ensures: each entry of `magnitude` is in [0, 2^32).
    """
    carry = 0
    for j in range(DIGITS):
        # |carry| <= 2^31 + 1 throughout, so no sum of halves leaves 64 bits.
        low = (state[j] & MASK) + (carry & MASK)
        carry = (state[j] >> 32) + (carry >> 32) + (low >> 32)
        magnitude[j] = low & MASK
    magnitude[DIGITS] = carry & MASK
    magnitude[DIGITS + 1] = (carry >> 32) & MASK
    negative = carry < 0
    if negative:
        one = 1
        for j in range(MAGNITUDE_DIGITS):
            flipped = (~magnitude[j] & MASK) + one
            magnitude[j] = flipped & MASK
            one = flipped >> 32
    return negative


@device_function
def divide_magnitude(magnitude, denominator):
    """Divide in place by 1 <= denominator < 2^31; return the remainder."""
    remainder = 0
    for back in range(MAGNITUDE_DIGITS):
        j = MAGNITUDE_DIGITS - 1 - back
        current = (remainder << 32) | magnitude[j]
        quotient = current // denominator
        remainder = current - quotient * denominator
        magnitude[j] = quotient
    return remainder


@device_function
def round_state(state, magnitude, denominator, significand_bits, exponent_bits):
    """`arithmetic.long_accumulator.finalize` of any state; `magnitude` is scratch. Requires: 0 <= denominator < 2^31.

    Digits resolve 2^-298, less than half of the smallest subnormal of every format accepted: the integer quotient and
    one bit for everything below it decide the rounding.
    """
    nan, positive, negative_count = state[NAN_PLACE], state[POSITIVE_INFINITY_PLACE], state[NEGATIVE_INFINITY_PLACE]
    if nan != 0 or positive != 0 or negative_count != 0:
        return special_bits(nan, positive, negative_count, significand_bits, exponent_bits)
    negative = resolve_magnitude(state, magnitude)
    top = MAGNITUDE_DIGITS - 1
    while top >= 0 and magnitude[top] == 0:
        top -= 1
    if denominator == 0:
        if top < 0:
            return special_bits(1, 0, 0, significand_bits, exponent_bits)
        return special_bits(0, 0 if negative else 1, 1 if negative else 0, significand_bits, exponent_bits)
    if top < 0:
        return 0
    remainder = 0
    if denominator != 1:
        remainder = divide_magnitude(magnitude, denominator)
        while top >= 0 and magnitude[top] == 0:
            top -= 1
        if top < 0:
            return encode(negative, 0, 0, significand_bits, exponent_bits)

    lowest = lowest_exponent(significand_bits, exponent_bits)
    length = 32 * top + bit_length(magnitude[top])
    # Ensures: shift >= 1, because lowest - LOWEST_EXPONENT >= 149.
    shift = max(length - significand_bits, lowest - LOWEST_EXPONENT)
    j, r = shift >> 5, shift & 31
    significand = 0
    if j < MAGNITUDE_DIGITS:
        significand = magnitude[j] >> r
    if j + 1 < MAGNITUDE_DIGITS:
        significand |= magnitude[j + 1] << (32 - r)

    half_place = shift - 1
    j, r = half_place >> 5, half_place & 31
    half = 0
    below = remainder != 0
    if j < MAGNITUDE_DIGITS:
        half = (magnitude[j] >> r) & 1
        below = below or (magnitude[j] & ((1 << r) - 1)) != 0
    if half == 1:
        i = 0
        while not below and i < j:
            below = magnitude[i] != 0
            i += 1
        if below or (significand & 1) == 1:
            significand += 1
    return encode(negative, significand, LOWEST_EXPONENT + shift - lowest, significand_bits, exponent_bits)


@device_function
def round_128(high, low, exponent, significand_bits, exponent_bits):
    """Bits of the float nearest to (high, low) * 2^exponent. Requires: |(high, low)| < 2^127."""
    negative = high < 0
    if negative:
        high, low = ~high, ~low
        low += 1
        if low == 0:
            high += 1
    if high == 0 and low == 0:
        return 0
    length = 64 + bit_length(high) if high != 0 else bit_length(low)
    lowest = lowest_exponent(significand_bits, exponent_bits)
    shift = max(length - significand_bits, lowest - exponent)
    places = exponent + shift - lowest
    if shift <= 0:
        # The value has fewer bits than a significand: nothing is cut.
        return encode(negative, low << -shift, places, significand_bits, exponent_bits)
    if shift > length:
        return encode(negative, 0, 0, significand_bits, exponent_bits)
    # From here 1 <= shift <= length <= 127, and the significand has at most 24 bits.
    if shift >= 64:
        significand = shift_right_logical(high, shift - 64) if shift < 128 else 0
    else:
        significand = shift_right_logical(low, shift)
        if shift > 0 and high != 0:
            significand |= high << (64 - shift)
    half_place = shift - 1
    if half_place >= 64:
        half = (high >> (half_place - 64)) & 1
        below = low != 0 or (high & ((1 << (half_place - 64)) - 1)) != 0
    else:
        half = shift_right_logical(low, half_place) & 1
        below = (low & ((1 << half_place) - 1)) != 0
    if half == 1 and (below or (significand & 1) == 1):
        significand += 1
    return encode(negative, significand, places, significand_bits, exponent_bits)


@device_function
def round_128_normal(high, low, exponent, significand_bits, exponent_bits):
    """(bits of the float nearest to (high, low) * 2^exponent, whether they are right), without branches: they are right
    where the float is a normal number. Requires: |(high, low)| < 2^127."""
    sign = high >> 63
    low = (low ^ sign) - sign
    high = (high ^ sign) - (sign if low == 0 else 0)
    wide = high != 0
    top = high if wide else low
    zeros = (64 - bit_length(top)) & 63
    # The magnitude with its highest bit at the top of 64 bits; what lies below these only matters if it is not zero.
    leading = (top << zeros) | (shift_right_logical(shift_right_logical(low, 1), 63 - zeros) if wide else 0)
    below = 1 if wide and (low << zeros) != 0 else 0
    cut = 64 - significand_bits
    significand = shift_right_logical(leading, cut)
    rest = (leading & ((1 << cut) - 1)) | below
    significand += 1 if rest + (significand & 1) > 1 << (cut - 1) else 0
    places = exponent + cut - zeros + (64 if wide else 0) - lowest_exponent(significand_bits, exponent_bits)
    # A significand that was rounded up to a power of two carries into the exponent by itself.
    bits = (places << (significand_bits - 1)) + significand
    bits |= (sign & 1) << (significand_bits + exponent_bits - 1)
    return bits, top != 0 and 0 <= places < (1 << exponent_bits) - 4
