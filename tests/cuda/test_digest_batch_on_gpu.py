"""Many digests in one launch: the lanes of the definition, for any tensors and any place of their elements."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic import tensor_digest  # noqa: E402
from det_lightning.kernels import cuda_digest_batch  # noqa: E402
from det_lightning.kernels.digest_place import Place  # noqa: E402
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes  # noqa: E402

pytestmark = pytest.mark.cuda

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int16,
    torch.int32, torch.int64, torch.complex64,
]  # fmt: skip
BLOCK = 4 * 32 * 256


def random(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 40).to(dtype)


def lanes_of(tensors, places=None) -> list[tuple[int, int]]:
    found = many_lanes([tensor.cuda() for tensor in tensors], places)
    return [tuple(lane % 2**64 for lane in row) for row in found.tolist()]


def on_cpu(tensors, places=None) -> list[tuple[int, int]]:
    return [tuple(lane % 2**64 for lane in row) for row in many_lanes(tensors, places).tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_many_sizes_in_one_launch(dtype):
    counts = [0, 1, 3, 4, 5, 1000, 1024, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4097, 0]
    tensors = [random(count, dtype, count) for count in counts]
    assert lanes_of(tensors) == on_cpu(tensors) == [tensor_lanes(tensor) for tensor in tensors]


def test_tensors_of_all_types_and_strides_in_one_launch():
    tensors = [random(5000, dtype) for dtype in DTYPES]
    tensors += [
        random(6000, torch.float32).view(60, 100).T,
        torch.tensor(2.5),
    ]
    assert lanes_of(tensors) == on_cpu(tensors)
    shifted = random(4099, torch.float32).cuda()[1:]  # not aligned to 16 bytes
    assert tuple(lane % 2**64 for lane in many_lanes([shifted])[0].tolist()) == tensor_lanes(shifted.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_nan_counts_as_the_canonical_one(dtype):
    tensor = random(3 * BLOCK + 5, dtype)
    tensor[[0, 7, 4096, 2 * BLOCK, -1]] = float("nan")
    bits = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[[7, 4096, -1]] += 3
    tensor[[1, 9]] = torch.tensor([float("inf"), float("-inf")]).to(dtype)
    other = torch.where(torch.isnan(bits.view(dtype)), bits.view(dtype), tensor)
    assert lanes_of([tensor, other]) == on_cpu([tensor, tensor])


@pytest.mark.parametrize(
    "first", [0, 4, 6, 2**30 - 2 * BLOCK, 2**30 - 4 * 777, 2**31 - 5, 3 * 2**30 - 4, 2**32 - BLOCK, 2**32 + 8]
)
def test_places_within_a_larger_tensor(first):
    tensor = random(4 * BLOCK + 7, torch.int32)
    places = [Place(first, tensor.numel(), tensor.numel())]
    expected = tensor_digest.lanes(tensor.numpy().view(np.uint32)[:600].tolist(), first)
    assert lanes_of([tensor[:600].clone()], [Place(first, 600, 600)]) == [expected]
    assert lanes_of([tensor], places) == on_cpu([tensor], places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize(
    ("run", "stride", "first"), [(8, 24, 16), (7, 9, 3), (1, 5, 4), (256, 4096, 1024), (12, 12, 0)]
)
def test_runs_of_elements_as_of_a_shard_of_columns(dtype, run, stride, first):
    tensor = random(run * 1501, dtype)
    place = Place(first, run, stride)
    assert lanes_of([tensor], [place]) == on_cpu([tensor], [place])


def test_a_table_is_used_again_while_the_tensors_stay_where_they_are():
    tensors = [random(100, torch.float32).cuda() for _ in range(3)]
    before = len(cuda_digest_batch._tables)
    first = many_lanes(tensors).tolist()
    tensors[1][5] += 1
    second = many_lanes(tensors).tolist()
    assert len(cuda_digest_batch._tables) == min(before + 1, cuda_digest_batch._MOST_TABLES)
    assert first[0] == second[0] and first[1] != second[1]


def test_many_sets_of_tensors_leave_few_tables():
    for count in range(200):
        many_lanes([random(count + 1, torch.float32).cuda()])
    assert len(cuda_digest_batch._tables) <= cuda_digest_batch._MOST_TABLES
