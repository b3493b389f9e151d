"""The comparison itself: what it accepts, what it refuses, and what it says."""

import pytest
import torch

from tests.same_bits import assert_same_bits


def test_nans_of_any_payload_are_the_same():
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    assert_same_bits(payloads, torch.full((3,), float("nan")))


def test_the_sign_of_zero_counts():
    with pytest.raises(AssertionError, match=r"first at \[1\]: 0x00000000 \(0.0\) and 0x80000000 \(-0.0\), 1 ulps"):
        assert_same_bits(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))


def test_the_first_difference_is_named_in_hex_decimal_and_ulps():
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0625]], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"1 of 4 .* \[1, 1\]: 0x4080 \(4.0\) and 0x4082 \(4.0625\), 2 ulps"):
        assert_same_bits(a, b)


def test_dtype_and_shape_count():
    with pytest.raises(AssertionError, match="dtypes differ"):
        assert_same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_same_bits(torch.zeros(2), torch.zeros(2, 1))
