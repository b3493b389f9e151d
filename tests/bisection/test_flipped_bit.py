import numpy
import pytest
import torch

from det_lightning.bisection.flipped_bit import array_digest, flipped_bit
from det_lightning.errors import InputError
from det_lightning.ledger.digest import tensor_digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
]


def array_of(tensor):
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 3)])
def test_the_digest_of_an_array_is_that_of_the_tensor(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    assert array_digest(array_of(tensor), name_of(dtype)) == tensor_digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_flipped_bit_of_any_type_is_named_with_index_bit_and_values(dtype):
    clean = (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    width = clean.element_size() * 8
    for bit in (0, width // 2, width - 1):
        words = array_of(clean).view(f"u{width // 8}").copy()
        before = int(words[2, 1])
        words[2, 1] ^= words.dtype.type(1 << bit)
        flipped = torch.from_numpy(words).view(dtype)
        found = flipped_bit(array_of(clean), tensor_digest(clean), tensor_digest(flipped))
        assert (found.index, found.bit, found.dtype) == ((2, 1), bit, name_of(dtype))
        assert (int(found.reference_bits, 16), int(found.candidate_bits, 16)) == (before, before ^ 1 << bit)
        if dtype is not torch.bfloat16:
            assert found.reference == str(array_of(clean)[2, 1])
        if dtype.is_floating_point and bit == 0:
            assert found.ulps == 1
        if not dtype.is_floating_point:
            assert found.ulps is None


def test_a_sign_flip_is_as_far_as_the_floats_between_a_number_and_its_negative():
    clean = torch.tensor([1.5])
    found = flipped_bit(clean.numpy(), tensor_digest(clean), tensor_digest(-clean))
    assert (found.bit, found.candidate, found.ulps) == (31, "-1.5", 2 * 0x3FC00000)


def test_a_flip_to_nan_has_no_distance():
    clean = torch.tensor([1.25])
    flipped = torch.tensor([0x7FA00000], dtype=torch.int32).view(torch.float32)
    found = flipped_bit(clean.numpy(), tensor_digest(clean), tensor_digest(flipped))
    assert (found.bit, found.candidate, found.ulps) == (30, "nan", None)


def test_an_array_that_is_not_the_recorded_tensor_is_refused():
    clean = torch.zeros(3)
    digest = tensor_digest(clean)
    with pytest.raises(InputError, match="the replay did not reproduce it"):
        flipped_bit(numpy.ones(3, numpy.float32), digest, digest)
    with pytest.raises(InputError, match=r"float64 tensor of shape \(3,\)"):
        flipped_bit(numpy.zeros(3), digest, digest)
