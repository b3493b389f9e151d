"""The floating-point formats, and every width that follows from them.

Two numbers define a binary format: the bits of its significand and the bits of its exponent. The constants of the
long accumulator follow from those of float32, the widest format accepted as an input (after IEEE 754-2019, 3.3).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary interchange format. A finite value is `significand * 2^lsb_exponent`, the significand an integer."""

    name: str
    significand_bits: int
    exponent_bits: int

    @property
    def bits(self) -> int:
        return self.significand_bits + self.exponent_bits

    @property
    def fraction_bits(self) -> int:
        return self.significand_bits - 1

    @property
    def exponent_mask(self) -> int:
        """The largest exponent field; it marks infinities and NaNs."""
        return (1 << self.exponent_bits) - 1

    @property
    def lowest_exponent(self) -> int:
        """The exponent of the smallest subnormal: float32 -149."""
        return 3 - (1 << (self.exponent_bits - 1)) - self.significand_bits

    @property
    def top_exponent(self) -> int:
        """Every finite value is smaller in magnitude than 2^top_exponent: float32 128."""
        return 1 << (self.exponent_bits - 1)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity_bits(self) -> int:
        return self.exponent_mask << self.fraction_bits

    @property
    def nan_bits(self) -> int:
        """The canonical NaN: positive, quiet, no payload."""
        return self.infinity_bits | 1 << (self.fraction_bits - 1)


FLOAT32 = Format("float32", 24, 8)
BFLOAT16 = Format("bfloat16", 8, 8)
FLOAT16 = Format("float16", 11, 5)
FLOAT64 = Format("float64", 53, 11)
FORMATS = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)}

DIGIT_BITS = 32
"""One digit of the long accumulator holds this many bits once carries are resolved."""

LOWEST_EXPONENT = 2 * FLOAT32.lowest_exponent
"""The exponent of digit 0: that of the product of two smallest subnormals, -298."""

DIGITS = -(-(2 * FLOAT32.top_exponent - LOWEST_EXPONENT) // DIGIT_BITS)
"""Digits that hold any product of two float32 values: 18. The last one is signed and has room for 2^63 terms."""

NAN_PLACE, POSITIVE_INFINITY_PLACE, NEGATIVE_INFINITY_PLACE = DIGITS, DIGITS + 1, DIGITS + 2
"""The places that count the terms which are no numbers."""

NB = DIGITS + 3
"""Places of an accumulator: the digits and the three counts, 21."""


def decode(bits: int, form: Format) -> tuple[int, int]:
    """The finite value of a bit pattern as (signed significand, exponent): value = significand * 2^exponent.

    The exponent is that of the pattern's last place, so zeros and subnormals have `form.lowest_exponent`.
    Raises ValueError for infinities and NaNs, which have no such form.
    """
    field = bits >> form.fraction_bits & form.exponent_mask
    if field == form.exponent_mask:
        raise ValueError(f"{bits:#x} is an infinity or a NaN of {form.name}; only finite values have a significand")
    significand = bits & ((1 << form.fraction_bits) - 1)
    if field:
        significand |= 1 << form.fraction_bits
    exponent = form.lowest_exponent + max(field, 1) - 1
    return (-significand if bits & form.sign_bit else significand), exponent


def is_nan(bits: int, form: Format) -> bool:
    return bits & ~form.sign_bit > form.infinity_bits


def is_infinity(bits: int, form: Format) -> bool:
    return bits & ~form.sign_bit == form.infinity_bits
