"""The digest lanes of tensors, against their definition on Python integers."""

import pytest
import torch

from det_lightning.arithmetic.formats import FORMATS
from det_lightning.arithmetic.tensor_digest import lanes, words_of
from det_lightning.errors import InputError
from det_lightning.kernels.cpu import digest
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32]
DTYPES = [*PLAIN, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so that floats hold NaNs of many payloads."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).view(shape)


def defined(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = 8 * tensor.element_size()
    elements = [v % (1 << bits) for v in tensor.contiguous().view(-1).view(INTEGERS[bits // 8]).tolist()]
    return lanes(words_of(elements, bits, FORMATS.get(str(tensor.dtype).removeprefix("torch."))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lanes_are_as_defined(dtype):
    torch.manual_seed(1)
    for shape in [(), (0,), (1,), (7, 5), (3, 0, 2), (2, 3, 4)]:
        tensor = random_tensor(dtype, *shape)
        assert tensor_lanes(tensor) == defined(tensor)
        assert tensor_lanes(tensor.movedim(0, -1) if shape else tensor) == defined(
            tensor.movedim(0, -1) if shape else tensor
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nans_of_every_payload_have_the_lanes_of_the_canonical_one(dtype):
    form = FORMATS[str(dtype).removeprefix("torch.")]
    integer = INTEGERS[form.bits // 8]
    payloads = [form.infinity_bits + 1, form.nan_bits, form.infinity_bits + 5 - form.sign_bit]
    tensors = [torch.tensor([payload], dtype=torch.int64).to(integer).view(dtype) for payload in payloads]
    assert len({tensor_lanes(tensor) for tensor in tensors}) == 1
    infinities = torch.tensor([float("inf"), float("-inf")], dtype=dtype)
    assert len({tensor_lanes(v) for v in (*infinities.split(1), tensors[0])}) == 3


def test_signs_of_zero_order_and_shape_in_memory(monkeypatch):
    a = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert tensor_lanes(a) != tensor_lanes(-a * 0 + a.abs() * torch.tensor([[-1.0, 1], [1, 1]]))
    assert tensor_lanes(a) != tensor_lanes(a.T)
    assert tensor_lanes(a) == tensor_lanes(a.T.contiguous().T)
    assert tensor_lanes(torch.conj(torch.tensor([1 + 2j]))) == tensor_lanes(torch.tensor([1 - 2j]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
def test_blocks_and_threads_do_not_matter(dtype, monkeypatch):
    torch.manual_seed(2)
    tensor = random_tensor(dtype, 70001)
    expected = tensor_lanes(tensor)
    assert expected == defined(tensor)
    monkeypatch.setattr(digest, "_BLOCK_WORDS", 6)
    assert tensor_lanes(tensor) == expected


def test_what_is_no_dense_cpu_tensor_is_refused():
    with pytest.raises(InputError, match=r"the argument is a list; pass a torch\.Tensor"):
        tensor_lanes([1.0])
    with pytest.raises(InputError, match="tensor is on device meta"):
        tensor_lanes(torch.ones(2, device="meta"))
    with pytest.raises(InputError, match="only strided tensors"):
        tensor_lanes(torch.eye(2).to_sparse())


@pytest.mark.parametrize("lanes", [tensor_lanes, lambda tensor: many_lanes([torch.ones(2), tensor])])
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_whose_memory_is_not_its_elements_is_refused_and_not_read(lanes):
    with pytest.raises(InputError, match="is a quantized tensor; only plain tensors"):
        lanes(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(InputError, match="is a nested tensor; only plain tensors"):
        lanes(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
