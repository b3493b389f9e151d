"""The digest of a tensor that is cut over ranks is that of the whole tensor."""

import pytest
import torch
import torch.distributed as dist
from det_lightning.callbacks.pieces import piece_of, place_of_box
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import StartedDigests, digests_of
from torch.distributed.device_mesh import init_device_mesh

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes
from tests.callbacks.sharded_trainings import join
from tests.claims.processes import Failed, on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64, torch.bool]


def cut_tensors(rank, world_size, port):
    """Digests of DTensors of all placements against those of the whole tensors; on every rank."""
    join(rank, world_size, port)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    wrong = []
    line, square = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (2, world_size // 2))
    cases = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Shard(2)]), (line, [Replicate()])]
    seconds = (Shard(0), Shard(1), Shard(2), Replicate())
    cases += [(square, [first, second]) for first in (Shard(0), Replicate()) for second in seconds]
    cases += [(square, [Shard(1), Shard(0)])]
    for dtype in DTYPES:
        for shape in ((7, 5, 6), (1, 9, 4), (4, 4, 8), (3, 1, 2)):
            tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
            pieces = {}
            for number, (mesh, placements) in enumerate(cases):
                pieces[str(number)] = piece_of("x", distribute_tensor(tensor, mesh, placements))
            found = StartedDigests(pieces, Shards({})).result()
            expected = digests_of({"x": tensor})["x"]
            wrong += [(str(dtype), shape, cases[int(number)][1]) for number, each in found.items() if each != expected]
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensors_of_every_placement_have_the_digest_of_the_whole_tensor(world_size):
    assert on_ranks(world_size, cut_tensors) == [[]] * world_size


def cut_by_tensor_parallelism_and_fsdp(rank, world_size, port):
    join(rank, world_size, port)
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    expected = digests_of(dict(model.named_parameters()))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    shards = Shards.of(model)
    found = StartedDigests(shards.pieces("weights", dict(model.named_parameters())), shards).result()
    dist.destroy_process_group()
    return found == expected


def test_tensor_parallelism_under_fsdp_has_the_digests_of_the_whole_tensors():
    assert on_ranks(4, cut_by_tensor_parallelism_and_fsdp) == [True] * 4


def one_changed_bit(rank, world_size, port):
    join(rank, world_size, port)
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.arange(10.0), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    if rank == 1:
        tensor.to_local().view(torch.int32)[0] ^= 1
    found = StartedDigests({"x": piece_of("x", tensor)}, Shards({})).result()["x"]
    dist.destroy_process_group()
    return found


def test_one_bit_of_one_shard_changes_the_digest():
    expected = torch.arange(10.0)
    expected.view(torch.int32)[5] ^= 1
    assert on_ranks(2, one_changed_bit) == [digests_of({"x": expected})["x"]] * 2
    assert digests_of({"x": expected}) != digests_of({"x": torch.arange(10.0)})


def test_a_part_cut_in_three_dimensions_is_refused_and_two_are_not():
    with pytest.raises(InputError, match=r"w \[4, 4, 4\] is cut in several dimensions"):
        place_of_box("w", (4, 4, 4), (2, 2, 2), (0, 0, 0))
    assert place_of_box("w", (4, 4, 4), (2, 4, 2), (2, 0, 2)) == (34, 2, 4)
    assert place_of_box("w", (4, 4), (4, 4), (0, 0)) is None
    assert place_of_box("w", (4, 4), (0, 4), (4, 0)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_of_runs_add_up_to_those_of_the_tensor(dtype):
    whole = (torch.randn((33, 70), generator=torch.Generator().manual_seed(2)) * 9).to(dtype)
    total = torch.zeros(2, dtype=torch.int64)
    for rows, columns in ((slice(0, 20), slice(0, 1)), (slice(20, 33), slice(0, 1)), (slice(0, 33), slice(1, 70))):
        part = whole[rows, columns]
        place = place_of_box("w", whole.shape, part.shape, (rows.start, columns.start))
        total += many_lanes([part], [place])[0]
    assert tuple(lane % 2**64 for lane in total.tolist()) == tensor_lanes(whole)


def test_a_dtensor_is_not_taken_for_a_whole_tensor(tmp_path):
    with pytest.raises(Failed, match="x is a DTensor"):
        on_ranks(1, digest_of_a_dtensor)


def digest_of_a_dtensor(rank, world_size, port):
    join(rank, world_size, port)
    from torch.distributed.tensor import Shard, distribute_tensor

    digests_of({"x": distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)])})
