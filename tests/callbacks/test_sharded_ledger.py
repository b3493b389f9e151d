"""A ledger of a sharded model holds the digests of the whole tensors, however they are cut."""

import pytest
import torch
import torch.distributed as dist
from det_lightning.callbacks.pieces import Piece, piece_of
from det_lightning.callbacks.plain_ledger import PlainLedger
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import StartedDigests
from torch.distributed.device_mesh import init_device_mesh

from det_lightning.ledger.store import LedgerReader
from tests.callbacks.sharded_trainings import (
    STEPS,
    Network,
    fit,
    fit_sharded,
    join,
    train,
    train_fully_sharded,
    train_whole,
    train_with_flat_parameters,
)
from tests.claims.processes import Failed, in_new_process, on_ranks


def test_a_trainer_with_model_parallel_strategy_records_whole_tensors(tmp_path):
    in_new_process(fit, tmp_path / "whole", strategy="auto")
    on_ranks(2, fit_sharded, tmp_path / "sharded")
    assert roots(tmp_path / "sharded") == roots(tmp_path / "whole")
    with LedgerReader(tmp_path / "whole") as whole, LedgerReader(tmp_path / "sharded") as sharded:
        assert whole.recipe["model"] == sharded.recipe["model"]
        assert sharded.recipe["arithmetic"] == "stock ModelParallelStrategy"


def roots(path):
    with LedgerReader(path) as reader:
        assert reader.verify_chain().sound and reader.closed
        return [record.agree["roots"] for record in reader.records()]


def leaves(path, step, kind):
    with LedgerReader(path) as reader:
        return reader.leaves(reader.record(step), kind)


@pytest.mark.parametrize("sharded", [train_fully_sharded, train_with_flat_parameters])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_training_has_the_leaves_and_roots_of_the_whole_one(tmp_path, sharded, world_size):
    in_new_process(train_whole, tmp_path / "whole")
    on_ranks(world_size, sharded, tmp_path / "sharded")
    whole, found = roots(tmp_path / "whole"), roots(tmp_path / "sharded")
    assert len(whole) == STEPS + 1
    for kind in ("weights", "buffers"):
        assert leaves(tmp_path / "sharded", 0, kind) == leaves(tmp_path / "whole", 0, kind)
    names = {kind: set(leaves(tmp_path / "whole", 2, kind)) for kind in ("gradients", "optimizer")}
    assert names == {kind: set(leaves(tmp_path / "sharded", 2, kind)) for kind in names}
    if world_size == 2:  # the mean of two equal gradients is exact, and so is all that follows
        assert found == whole


def train_with_sharding_strategy(rank, world_size, port, path, strategy):
    join(rank, world_size, port)
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}
    options = {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device("cpu"), **mesh}
    train(path, FullyShardedDataParallel(Network(), use_orig_params=True, **options))
    dist.destroy_process_group()


@pytest.mark.parametrize(("strategy", "world_size"), [("SHARD_GRAD_OP", 2), ("NO_SHARD", 2), ("HYBRID_SHARD", 4)])
def test_every_sharding_strategy_of_fsdp_has_the_roots_of_the_whole_training(tmp_path, strategy, world_size):
    in_new_process(train_whole, tmp_path / "whole")
    on_ranks(world_size, train_with_sharding_strategy, tmp_path / "sharded", strategy)
    assert roots(tmp_path / "sharded") == roots(tmp_path / "whole")


def pending_sum(rank, world_size, port):
    join(rank, world_size, port)
    from torch.distributed.tensor import DTensor, Partial

    piece_of("layer.weight", DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (world_size,)), [Partial()]))


def overlapping_parts(rank, world_size, port):
    join(rank, world_size, port)
    piece = Piece(torch.ones(4), torch.Size([6]), sharded=True)
    StartedDigests({"layer.weight": piece}, Shards({}))


def flat_without_names(rank, world_size, port):
    join(rank, world_size, port)
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torch.nn.Linear(3, 2), use_orig_params=False, device_id=torch.device("cpu"))
    Shards.of(model)


def copies_of_shards(rank, world_size, port, path):
    join(rank, world_size, port)
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Network(), mesh=init_device_mesh("cpu", (world_size,)))
    PlainLedger(path, model, replicas=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (pending_sum, "layer.weight is a DTensor with placements"),
        (overlapping_parts, r"layer.weight \[6\] have 8 elements together"),
        (flat_without_names, "leave it at True"),
    ],
)
def test_parts_that_do_not_add_up_are_refused_by_name(function, message):
    with pytest.raises(Failed, match=message) as raised:
        on_ranks(2, function)
    assert raised.value.kind == "InputError"


def test_copies_of_a_sharded_model_are_not_compared(tmp_path):
    with pytest.raises(Failed, match="replicas=True compares copies"):
        on_ranks(2, copies_of_shards, tmp_path / "ledger")
