"""Tensors leave a replay with their bits, in every type; NumPy has no bfloat16, which comes as uint16."""

import numpy
import pytest
import torch

from det_lightning.bisection.element import element_difference
from det_lightning.bisection.flipped_bit import flipped_bit
from det_lightning.ledger.digest import tensor_digest
from det_lightning.replay.run import array_of

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_array_has_the_bits_of_its_tensor(dtype):
    tensor = (torch.arange(12).reshape(3, 4) - 5).to(dtype).T
    array = array_of(tensor)
    assert array.shape == (4, 3)
    assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert array_of(torch.empty(0, 2, dtype=dtype)).shape == (0, 2)


def test_a_flipped_bit_of_a_bfloat16_tensor_is_named():
    tensor = torch.linspace(-2, 2, 20).bfloat16().reshape(4, 5)
    flipped = tensor.clone()
    flipped.view(torch.int16)[2, 3] ^= 1 << 6
    found = flipped_bit(array_of(tensor), tensor_digest(tensor), tensor_digest(flipped))
    assert (found.dtype, found.index, found.bit) == ("bfloat16", (2, 3), 6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_first_differing_element_is_found_in_every_type(dtype):
    one = (torch.arange(12) % 2).reshape(3, 4).to(dtype)
    other = one.clone()
    other[1, 2:] = 1
    other[2, 1] = 0
    found = element_difference(array_of(one), array_of(other), dtype=str(dtype).removeprefix("torch."))
    assert (found.index, found.count, found.size) == ((1, 2), 2, 12)
    assert [_number(found.reference), _number(found.candidate)] == [0.0, 1.0]
    assert element_difference(array_of(one), array_of(one), dtype=str(dtype).removeprefix("torch.")) is None


def _number(text: str) -> float:
    return {"False": 0.0, "True": 1.0}[text] if text in ("False", "True") else float(text)


def test_nans_are_equal_whatever_their_bits_zeros_are_not_and_a_distance_is_counted_over_zero():
    one = numpy.array([0x7FC00000, 0xFFFFFFFF, 0x00000000], dtype=numpy.uint32).view(numpy.float32)
    other = numpy.array([0x7F800001, 0x7FC00000, 0x80000000], dtype=numpy.uint32).view(numpy.float32)
    found = element_difference(one, other, dtype="float32")
    assert (found.index, found.count, found.ulps) == ((2,), 1, 0)
    least = numpy.float32(1e-45)
    assert element_difference(numpy.array([least]), numpy.array([-least]), dtype="float32").ulps == 2
    assert element_difference(numpy.array([least]), numpy.array([numpy.float32("nan")]), dtype="float32").ulps is None
