"""Scratch memory that is kept between products: never shared, never larger than the bound."""

import pytest
import torch

from det_lightning.kernels.cpu import workspace as module
from det_lightning.kernels.cpu.workspace import Cutter, padded, workspace


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(module, "_kept", [])


def test_memory_is_used_again_and_never_by_two_at_once():
    with workspace(1000) as first, workspace(1000) as second:
        assert first.data_ptr() != second.data_ptr()
    with workspace(500) as third:
        assert third.data_ptr() in (first.data_ptr(), second.data_ptr())
    assert len(module._kept) == 1


def test_an_error_inside_gives_the_memory_back():
    with pytest.raises(ValueError), workspace(100) as buffer:
        raise ValueError
    assert module._kept[0] is buffer


def test_more_than_the_bound_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    with workspace(101):
        pass
    assert module._kept == []


def test_arrays_do_not_overlap_and_start_on_cache_lines():
    sizes = [
        (torch.int8, (3, 5)),
        (torch.int32, (7,)),
        (torch.float64, (2, 2)),
        (torch.int8, (0, 4)),
        (torch.int64, (1,)),
    ]
    needed = sum(padded(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in sizes)
    with workspace(needed) as buffer:
        memory = Cutter(buffer)
        arrays = [memory.take(dtype, *shape) for dtype, shape in sizes]
        for number, array in enumerate(arrays):
            array.fill_(number)
        assert all(bool((array == number).all()) for number, array in enumerate(arrays))
        assert [(array.data_ptr() - buffer.data_ptr()) % 64 for array in arrays] == [0] * 5
