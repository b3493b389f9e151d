import math
import struct
from dataclasses import dataclass

import numpy
import pytest
import torch
from blake3 import blake3

from det_lightning.arithmetic.tensor_digest import lanes
from det_lightning.errors import InputError
from det_lightning.ledger.digest import tensor_digest, value_digest


def test_a_tensor_digest_is_the_lanes_keyed_by_dtype_and_shape():
    tensor = torch.tensor([[1.0, -0.0], [math.inf, 1e-45]])
    words = [0x3F800000, 0x80000000, 0x7F800000, 1]
    key = struct.unpack("<QQ", blake3(b"float32|2,2").digest()[:16])
    expected = [(lane + k) % 2**64 for lane, k in zip(lanes(words), key, strict=True)]
    assert tensor_digest(tensor) == struct.pack("<QQ", *expected)
    scalar_key = blake3(b"int64|").digest()[:16]
    assert tensor_digest(torch.tensor(0)) != scalar_key


def test_strides_do_not_enter_a_tensor_digest_but_place_shape_and_dtype_do():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert tensor_digest(tensor.T.contiguous().T) == tensor_digest(tensor)
    others = [
        tensor.T,
        tensor.reshape(4, 3),
        tensor.reshape(12),
        tensor.flip(0),
        tensor.to(torch.bfloat16),
        tensor.view(torch.int32),
        tensor[:2],
        torch.where(tensor == 5, torch.tensor(-0.0), tensor),
    ]
    digests = {tensor_digest(each) for each in (tensor, *others)}
    assert len(digests) == len(others) + 1


@dataclass
class Point:
    x: int
    y: int


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    10**30,
    0.0,
    -0.0,
    1.0,
    math.nan,
    math.inf,
    "",
    "1",
    "ü",
    b"",
    b"1",
    bytearray(b"1"),
    [],
    (),
    {},
    set(),
    [1],
    (1,),
    [[1]],
    [1, 2],
    [2, 1],
    ["ab", "c"],
    ["a", "bc"],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {1},
    {1, 2},
    torch.zeros(2),
    torch.zeros(2, 1),
    torch.zeros(2, dtype=torch.int32),
    torch.tensor([0.0, -0.0]),
    numpy.zeros(2),
    numpy.zeros((2, 1)),
    numpy.zeros(2, dtype=numpy.float32),
    numpy.float32(0),
    numpy.array(["a"]),
    numpy.array([None, "a"], dtype=object),
    numpy.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    numpy.array([(1, 2)], dtype=[("b", "i4"), ("a", "i4")]),
    Point(1, 2),
    Point(2, 1),
]


def test_samples_that_differ_in_type_order_shape_or_value_have_other_digests():
    digests = [value_digest(value) for value in VALUES]
    assert all(0 <= digest < 2**64 for digest in digests)
    equal = [(VALUES[i], VALUES[j]) for i in range(len(VALUES)) for j in range(i) if digests[i] == digests[j]]
    assert equal == []


def test_equal_samples_have_equal_digests_whatever_the_order_of_a_dict_the_strides_or_the_nan():
    assert value_digest({"a": 1, "b": 2}) == value_digest({"b": 2, "a": 1})
    array = numpy.arange(6).reshape(2, 3)
    assert value_digest(numpy.asfortranarray(array)) == value_digest(array)
    assert value_digest(array.astype(">i8")) == value_digest(array.astype("<i8"))
    assert value_digest(torch.arange(6).reshape(3, 2).T) == value_digest(torch.arange(6).reshape(3, 2).T.contiguous())
    assert value_digest(-math.nan) == value_digest(math.nan)


def test_digests_are_the_same_in_every_process_and_version():
    sample = [{"x": torch.arange(3.0), "y": {"a", "b", "c"}}, (numpy.arange(3), "text", b"raw", 1.5, None)]
    assert value_digest(sample) == 0xA205E9A822D5008A
    assert tensor_digest(torch.arange(6.0).reshape(2, 3)).hex() == "29cabd01f844a294feafd106e310f0de"


def test_a_sample_that_cannot_be_digested_is_refused_with_its_type():
    with pytest.raises(InputError, match=r"holds a .*function.*which cannot be digested"):
        value_digest([lambda: 1])
    endless: list = []
    endless.append(endless)
    with pytest.raises(InputError, match="contains itself or is nested too deeply"):
        value_digest(endless)
