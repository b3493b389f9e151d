import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.cli.printing import decimal, field_text, header_name, header_text, value_text, visible


@given(st.floats(width=32, allow_nan=False))
def test_the_decimal_of_a_float32_reads_back_as_the_same_bits(value):
    bits = struct.pack(">f", value).hex()
    assert struct.pack(">f", float(decimal(bits))).hex() == bits


@given(st.floats(allow_nan=False))
def test_the_decimal_of_a_float64_reads_back_as_the_same_bits(value):
    bits = struct.pack(">d", value).hex()
    assert struct.pack(">d", float(decimal(bits))).hex() == bits


@pytest.mark.parametrize("bits", ["", "zz", "-00000000000000f", "0x00000000000000", "1_00000000000000", "3f8"])
def test_what_is_no_float_has_no_decimal(bits):
    assert decimal(bits) == "?"


@given(st.text())
def test_no_text_moves_the_cursor_and_none_grows_beyond_its_width(text):
    assert visible(text).isprintable()
    assert len(visible(text, widest=20)) <= 20


def test_values_are_shown_as_people_read_them():
    assert value_text(None) == "-"
    assert value_text('"text"') == "text"
    assert value_text('{"a":1}') == '{"a":1}'
    assert field_text("loss", "3f800000") == "1 (3f800000)"
    assert field_text("learning_rates", ["3fb999999999999a", None]) == "0.1 (3fb999999999999a), -"
    assert field_text("learning_rates", []) == "-"
    clip = {"norm": "3f800000", "coefficient": "3f000000"}
    assert field_text("clip", clip) == "coefficient 0.5 (3f000000), norm 1 (3f800000)"
    assert field_text("sample_ids", "3f800000") == "3f800000"
    assert field_text("loss", {"odd": "value"}) == '{"odd": "value"}'


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("optimizers.0.groups.0.lr", '"3fa999999999999a"', "0.05 (3fa999999999999a)"),
        ("optimizers.0.groups.0.betas", '["3fe0000000000000"]', "0.5 (3fe0000000000000)"),
        ("optimizers.0.class", '"SGD"', "SGD"),
        ("arguments.lr.float64", '"7ff8000000000000"', "nan (7ff8000000000000)"),
        ("model", '"3fa999999999999a"', "3fa999999999999a"),
        ("clip.value", None, "-"),
    ],
)
def test_a_headers_floats_are_decimal_numbers_and_bits(name, value, text):
    assert header_text(name, value) == text
    assert header_name(name) == name.removesuffix(".float64")
