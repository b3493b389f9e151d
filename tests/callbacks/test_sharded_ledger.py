"""A ledger of a sharded model holds the digests of the whole tensors, however they are cut."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from det_lightning.callbacks.pieces import Piece, piece_of, place_of_box
from det_lightning.callbacks.plain_ledger import PlainLedger
from det_lightning.callbacks.shards import Shards
from det_lightning.callbacks.started_digests import StartedDigests, digests_of
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from det_lightning.errors import InputError
from det_lightning.kernels.dispatch import many_lanes, tensor_lanes
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import given_ranks
from tests.claims.processes import Failed, in_new_process, on_ranks

STEPS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64, torch.bool]


def join(rank, world_size, port):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


class Network(torch.nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second, self.third = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 3)
        self.frozen = torch.nn.Parameter(torch.zeros(11), requires_grad=False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x):
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


def batch(step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


def train(path, model):
    """Every rank sees the whole batch, so that the mean of the ranks' gradients is each rank's gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with PlainLedger(path, model, optimizer) as ledger:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            ledger.before_step()
            optimizer.step()
            ledger.after_step(batch=batch(step))


def train_whole(path):
    train(path, Network())


def train_fully_sharded(rank, world_size, port, path):
    join(rank, world_size, port)
    from torch.distributed.fsdp import fully_shard

    model, mesh = Network(), init_device_mesh("cpu", (world_size,))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    train(path, model)
    dist.destroy_process_group()


def train_with_flat_parameters(rank, world_size, port, path):
    join(rank, world_size, port)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        Network(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    )
    train(path, wrapped)
    dist.destroy_process_group()


class Module(LightningModule):
    """`Network` under a Trainer; cut in `configure_model` where the strategy has a mesh."""

    def __init__(self):
        super().__init__()
        self.net = Network()

    def configure_model(self):
        if getattr(self, "device_mesh", None) is not None:
            from torch.distributed.fsdp import fully_shard

            for layer in (self.net.first, self.net.second, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(path, *, devices=1, **options):
    """Every rank sees every batch."""
    quiet_lightning()
    loader = torch.utils.data.DataLoader([(batch(step),) for step in range(STEPS)], batch_size=None)
    options = {"accelerator": "cpu", **options}
    callbacks = [WeightLedger(path)]
    trainer = Trainer(
        devices=devices, max_epochs=1, callbacks=callbacks, use_distributed_sampler=False, **options, **QUIET_TRAINER
    )
    trainer.fit(Module(), loader)


def fit_sharded(rank, world_size, port, path):
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    fit(path, devices=world_size, strategy=strategy, plugins=[given_ranks(rank, world_size, port)])
    dist.destroy_process_group()


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
