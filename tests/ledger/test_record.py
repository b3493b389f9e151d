import math

import numpy
import pytest
from blake3 import blake3

from det_lightning.errors import LedgerError
from det_lightning.ledger.record import (
    FIRST_TRACE,
    bits_float,
    canonical_json,
    float_bits,
    next_trace,
    root,
    with_float_bits,
    with_floats,
)


def test_canonical_json_has_one_spelling_whatever_the_order_of_keys():
    assert canonical_json({"b": [1, None, True], "a": {"ü": "x"}}) == '{"a":{"ü":"x"},"b":[1,null,true]}'.encode()
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert canonical_json({"a": [1, 2]}) != canonical_json({"a": [2, 1]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr": 0.1}, "value['lr'] is the float 0.1; write float_bits(x)"),
        ({"x": [float("nan")]}, "value['x'][0] is the float nan"),
        ({1: 2}, "has the key 1"),
        ({"x": numpy.int64(3)}, "is a int64"),
        ({"x": b"1"}, "is a bytes"),
        ({"x": "\ud800"}, "lone surrogate"),
    ],
)
def test_canonical_json_refuses_what_has_no_one_spelling_and_says_where(value, message):
    with pytest.raises(LedgerError) as caught:
        canonical_json(value)
    assert message in str(caught.value)


def test_nesting_without_end_is_refused():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(LedgerError, match="nested more than 64 levels"):
        canonical_json(nested)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.1, "3fb999999999999a"),
        (-0.0, "8000000000000000"),
        (1, "3ff0000000000000"),
        (math.inf, "7ff0000000000000"),
        (-math.nan, "7ff8000000000000"),
        (numpy.float64(0.1), "3fb999999999999a"),
        (numpy.float32(0.1), "3dcccccd"),
        (numpy.float32("nan"), "7fc00000"),
        (numpy.float32(1e-45), "00000001"),
        (numpy.float16(-2), "c000"),
    ],
)
def test_float_bits_are_the_ieee_bits_of_the_value_given(value, bits):
    assert float_bits(value) == bits
    if len(bits) in (8, 16) and value == value:
        assert float_bits(type(value)(bits_float(bits))) == bits


def test_float_bits_of_torch_scalars_keep_their_own_width():
    torch = pytest.importorskip("torch")
    assert float_bits(torch.tensor(0.1)) == "3dcccccd"
    assert float_bits(torch.tensor(0.1, dtype=torch.float64)) == "3fb999999999999a"
    assert float_bits(torch.tensor(0.1, dtype=torch.bfloat16)) == "3dcd"
    assert float_bits(torch.tensor(math.nan, dtype=torch.bfloat16)) == "7fc0"


def test_a_root_depends_on_every_name_and_every_digest_but_not_on_their_order():
    one = {"a": b"1" * 16, "b": b"2" * 16}
    assert root(one) == root(dict(reversed(one.items())))
    assert root(one) != root({"a": b"2" * 16, "b": b"1" * 16})
    assert root(one) != root({"a": b"1" * 16})
    assert root({"ab": b"1" * 16}) != root({"a": b"1" * 16})
    by_hand = b"\1" + b"\0" * 7 + b"a" + b"\x10" + b"\0" * 7 + b"1" * 16
    assert root({"a": b"1" * 16}) == blake3(by_hand).hexdigest()


def test_a_root_refuses_digests_of_another_length():
    with pytest.raises(LedgerError, match="each digest is 16 bytes"):
        root({"a": b"1" * 15})


def test_a_trace_binds_a_record_to_all_records_before_it():
    first = next_trace(FIRST_TRACE, {"step": 0})
    assert first == blake3(b"\0" * 32 + b'{"step":0}').hexdigest()
    assert next_trace(first, {"step": 1}) != next_trace(FIRST_TRACE, {"step": 1})


def test_floats_in_arguments_come_back_to_the_bit():
    value = {"rate": 0.1, "betas": [0.9, -0.0], "deep": {"nan": float("inf"), "n": 3, "text": "0.1", "none": None}}
    kept = with_float_bits(value)
    assert canonical_json(kept)
    assert repr(with_floats(kept)) == repr(value)
