"""The kernels that digest tensors against the CPU's digests, without a GPU: run by an emulator (`emulator`)."""

import ctypes
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_lightning.arithmetic import tensor_digest  # noqa: E402
from det_lightning.arithmetic.formats import FLOAT32  # noqa: E402
from det_lightning.kernels import cuda_digest, cuda_digest_batch  # noqa: E402
from det_lightning.kernels.digest_place import Place  # noqa: E402
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes  # noqa: E402

from . import emulator as emulation  # noqa: E402
from .test_digest_batch_on_gpu import BLOCK, DTYPES, random  # noqa: E402

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no g++ since 12")

# PTX of tensor_digest.cuh that a host does not have, by what it begins with, and what it means.
PTX = {
    '"=&l"(product)': "product = (static_cast<uint64>(high) << 32 | low) * FACTOR;",
    '"=&l"(z)': "z = static_cast<uint64>(low) * SPLITMIX_FIRST + (static_cast<uint64>(of_high) << 32);",
}
PROGRAM = """
#include "call.h"
#include "digest_batch.cu"
#include "tensor_digest.cu"
extern "C" void digest_batches(unsigned blocks, unsigned count, const long long* values) {
    grid::call(digest_batch, blocks, 1, count, values);
}
extern "C" void digest_one(unsigned blocks, unsigned count, const long long* values) {
    grid::call(tensor_digest, blocks, 1, count, values);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulator")
    emulation.Emulator(folder)  # writes the sources
    header = folder / "tensor_digest.cuh"
    statements = re.findall(r"asm\(.*?\);", header.read_text(), re.S)
    text = header.read_text()
    for mark, meaning in PTX.items():
        (statement,) = [each for each in statements if mark in each]
        text = text.replace(statement, meaning)
    assert "asm(" not in text
    header.write_text(text)
    return emulation.build(PROGRAM, folder / "digest.so")


@pytest.fixture
def launch(library):
    """Stands in for `cuda.launch`."""

    def launch(device, source, kernel, blocks, threads, *arguments):
        call = {"digest_batch": library.digest_batches, "tensor_digest": library.digest_one}[kernel]
        assert source == kernel
        call(blocks[0], threads, (ctypes.c_longlong * len(arguments))(*arguments))
        emulation.check_faults(library, kernel)

    return launch


@pytest.fixture
def emulated(launch, monkeypatch):
    """(tensors, places) -> lanes as the wrapper and the emulated kernel make them."""
    monkeypatch.setattr(cuda_digest_batch, "launch", launch)
    monkeypatch.setattr(cuda_digest_batch, "_table_on", lambda device, rows: torch.tensor(rows, dtype=torch.int64))
    return lambda tensors, places=None: cuda_digest_batch.many_lanes(tensors[0], tensors, places).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_one_tensor_in_any_number_of_blocks(launch, monkeypatch, dtype, multiprocessors):
    monkeypatch.setattr(cuda_digest, "launch", launch)
    monkeypatch.setattr(cuda_digest, "multiprocessors", lambda index: multiprocessors)
    monkeypatch.setattr(cuda_digest, "_MOST_BLOCKS", 2 * multiprocessors)
    tensors = [random(count, dtype, count) for count in (1, 3, 1025, 3 * BLOCK + 4099)]
    tensors += [random(600, dtype).view(20, 30).T, random(1000, dtype)[1:], torch.tensor(3).to(dtype)]
    if dtype.is_floating_point:
        tensors[3][[5, 4096, BLOCK]] = torch.tensor([float("nan"), float("inf"), float("-inf")]).to(dtype)
        tensors[3].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[7] = -3
    for tensor in tensors:
        assert cuda_digest.tensor_lanes(tensor) == tensor_lanes(tensor)


@pytest.mark.parametrize("first", [4, 6, 2**30 - 2048, 2**30 - 4 * 777, 2**32 - 4096, 2**32 + 8])
@pytest.mark.parametrize("threads", [32, 256])
def test_one_part_of_a_larger_tensor(launch, first, threads):
    part = random(BLOCK // 4 + 7, torch.int32)
    for code, form in ((6, None), (0, FLOAT32)):  # words, and float32 of the same bits
        lanes = torch.zeros(2, dtype=torch.int64)
        launch(
            None,
            "tensor_digest",
            "tensor_digest",
            (3,),
            threads,
            part.data_ptr(),
            code,
            part.numel(),
            first,
            lanes.data_ptr(),
        )
        words = tensor_digest.words_of(part.numpy().view(np.uint32).tolist(), 32, form)
        assert tuple(lane % 2**64 for lane in lanes.tolist()) == tensor_digest.lanes(words, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_many_sizes_in_one_launch(emulated, dtype):
    tensors = [random(count, dtype, count) for count in (0, 1, 3, 4, 5, 1000, 4096, BLOCK - 1, BLOCK + 5, 0)]
    tensors += [random(600, dtype).view(20, 30).T, random(9, dtype)[1:], torch.tensor(3).to(dtype)]
    assert emulated(tensors) == many_lanes(tensors).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_nan_counts_as_the_canonical_one(emulated, dtype):
    tensor = random(BLOCK + 5, dtype)
    tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])[[0, 7, 4096, -1]] = -3
    tensor[[1, 9]] = torch.tensor([float("inf"), float("-inf")]).to(dtype)
    assert bool(torch.isnan(tensor[[0, 7, 4096, -1]]).all())
    assert emulated([tensor]) == many_lanes([tensor]).tolist()


@pytest.mark.parametrize("first", [0, 4, 6, 2**30 - 2048, 2**30 - 4 * 777, 3 * 2**30 - 4, 2**32 - 4096, 2**32 + 8])
def test_places_within_a_larger_tensor(emulated, first):
    tensor = random(BLOCK + 7, torch.int32)
    places = [Place(first, tensor.numel(), tensor.numel())]
    assert emulated([tensor], places) == many_lanes([tensor], places).tolist()
    assert emulated([tensor]) != emulated([tensor], [Place(first + 1, tensor.numel(), tensor.numel())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64])
@pytest.mark.parametrize(
    ("run", "stride", "first"), [(8, 24, 16), (7, 9, 3), (1, 5, 4), (256, 4096, 1024), (12, 12, 0), (8, 2**28, 8)]
)
def test_runs_of_elements_as_of_a_shard_of_columns(emulated, dtype, run, stride, first):
    tensor = random(run * 301, dtype)
    places = [Place(first, run, stride)]
    assert emulated([tensor], places) == many_lanes([tensor], places).tolist()
