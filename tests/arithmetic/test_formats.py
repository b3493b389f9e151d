"""The constants that follow from the two numbers of float32, against the numbers of the contract."""

import numpy as np
import pytest

from det_lightning.arithmetic import formats
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, decode, is_infinity, is_nan


def test_the_accumulator_has_the_digits_of_the_contract():
    assert (formats.DIGITS, formats.NB, formats.LOWEST_EXPONENT, formats.DIGIT_BITS) == (18, 21, -298, 32)
    assert (formats.NAN_PLACE, formats.POSITIVE_INFINITY_PLACE, formats.NEGATIVE_INFINITY_PLACE) == (18, 19, 20)


@pytest.mark.parametrize(
    ("form", "lowest", "top", "nan"),
    [
        (FLOAT32, -149, 128, 0x7FC00000),
        (BFLOAT16, -133, 128, 0x7FC0),
        (FLOAT16, -24, 16, 0x7E00),
        (FLOAT64, -1074, 1024, 0x7FF8000000000000),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_exponents_and_canonical_nans_are_those_of_the_standard(form, lowest, top, nan):
    assert (form.lowest_exponent, form.top_exponent, form.nan_bits) == (lowest, top, nan)
    assert form.sign_bit == 1 << (form.bits - 1)


@pytest.mark.parametrize(
    ("form", "integer", "floating"), [(FLOAT32, np.uint32, np.float32), (FLOAT16, np.uint16, np.float16)]
)
def test_decoded_values_are_those_of_the_processor(form, integer, floating):
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << form.bits, 5000, dtype=np.uint64).astype(integer)
    with np.errstate(invalid="ignore"):
        values = patterns.view(floating).astype(np.float64)
    for bits, value in zip(patterns.tolist(), values, strict=True):
        assert is_nan(bits, form) == np.isnan(value)
        assert is_infinity(bits, form) == np.isinf(value)
        if np.isfinite(value):
            significand, exponent = decode(bits, form)
            assert significand * 2.0**exponent == value


def test_decoding_an_infinity_is_refused():
    with pytest.raises(ValueError, match="infinity or a NaN of float32"):
        decode(FLOAT32.infinity_bits, FLOAT32)
