"""The promise in a loop of one's own: Fabric(strategy="det") gives the bytes that Trainer(strategy="det") gives, at every
world size and accumulation; plain loops of Fabric's documentation run unchanged.
"""

import gc
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

import det_lightning
from det_lightning.strategies.fabric_of_lightning import FabricDetStrategy
from det_lightning.strategies.given_ranks import free_port, given_ranks
from tests.claims.processes import on_ranks
from tests.claims.test_streams import InOrder, Reshuffled
from tests.claims.trainings import CLASSES, FEATURES, HIDDEN, Network, Run, Split, bytes_of, raw, spread_samples, train


class Layers(nn.Module):
    """The Trainer's Network as a plain module; the loss is the loop's."""

    def __init__(self, dropout: float = 0.0, gated: bool = False):
        super().__init__()
        start = Network()
        self.gated = gated
        self.hidden, self.output = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.load_state_dict(start.state_dict())
        if gated:
            self.gate, self.shift = (nn.Parameter(torch.linspace(-1, 1, HIDDEN)) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.hidden(x)
        if self.gated:
            h = h * torch.sigmoid(self.gate) + self.shift
        return self.output(self.dropout(F.relu(h)))


@dataclass(frozen=True)
class Loop:
    """A training in a loop of the user's own."""

    split: Split = field(default_factory=lambda: Split(1, 24, 1))
    steps: int = 9
    samples: int = 58
    shuffle: bool = True
    dropout: float = 0.0
    gated: bool = False
    clip: dict[str, float] = field(default_factory=lambda: {"max_norm": 0.05})
    options: dict[str, Any] = field(default_factory=dict)
    strategy: str = "det"
    namespace: str = "lightning.fabric"
    precision: str = "32-true"
    accelerator: str = "cpu"
    loss: str = "cross_entropy"
    workers: int = 0
    evaluate: int | None = None
    save: Path | None = None
    resume: Path | None = None


def loss_of(name: str, output, y):
    if name == "cross_entropy":
        return F.cross_entropy(output, y)
    if name == "exact_mean":
        return det_lightning.exact_mean(F.cross_entropy(output, y, reduction="none"))
    target = F.one_hot(y, CLASSES).float()
    return 0.5 * nn.MSELoss()(output, target) + 0.25 * F.l1_loss(output, target)


def evaluated(fabric, model, loader) -> tuple[int, int]:
    """(samples seen on all ranks, how many of them were right)."""
    model.eval()
    seen = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for x, y in loader:
            seen += torch.tensor([len(y), int((model(x).argmax(1) == y).sum())])
    model.train()
    return tuple(fabric.all_reduce(seen, reduce_op="sum").tolist())


def run(rank: int, world_size: int, port: int, loop: Loop) -> dict[str, Any]:
    """The weights after each step, the losses, and what else a loop sees."""
    ranks = given_ranks(rank, world_size, port, namespace=loop.namespace)
    fabrics, accumulate = import_module(loop.namespace), loop.split.accumulate
    if loop.strategy == "det":
        module = {"lightning.fabric": "fabric_of_lightning", "lightning_fabric": "fabric_alone"}[loop.namespace]
        kind = import_module(f"det_lightning.strategies.{module}").FabricDetStrategy
        strategy = kind(cluster_environment=ranks, **{"accumulate": accumulate, "global_batch": 24, **loop.options})
    else:
        strategy = fabrics.strategies.DDPStrategy(cluster_environment=ranks)
    fabric = fabrics.Fabric(
        accelerator=loop.accelerator, devices=world_size, strategy=strategy, precision=loop.precision
    )
    fabric.launch()
    model = Layers(loop.dropout, loop.gated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(
        spread_samples(loop.samples), batch_size=loop.split.batch, shuffle=loop.shuffle, num_workers=loop.workers
    )
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    if loop.resume is not None:
        assert "det_lightning" not in fabric.load(loop.resume, state)
    seen = {"weights": [bytes_of(model)], "losses": [], "counts": [], "norms": []}
    if loop.evaluate is not None:
        held_out = fabric.setup_dataloaders(DataLoader(spread_samples(loop.evaluate), batch_size=4))
    try:
        while state["steps"] < loop.steps:
            for number, (x, y) in enumerate(loader):
                more = (number + 1) % accumulate != 0
                with fabric.no_backward_sync(model, enabled=more):
                    loss = loss_of(loop.loss, model(x), y)
                    fabric.backward(loss)
                if more:
                    continue
                if loop.clip:
                    norm = fabric.clip_gradients(model, optimizer, **loop.clip)
                    seen["norms"].append(None if norm is None else raw(norm))
                optimizer.step()
                optimizer.zero_grad()
                state["steps"] += 1
                seen["weights"].append(bytes_of(model))
                if loop.strategy == "det":
                    seen["losses"].append(raw(fabric.strategy.step_facts.loss))
                if loop.evaluate is not None:
                    seen["counts"].append(evaluated(fabric, model, held_out))
                if state["steps"] == loop.steps:
                    break
        if loop.save is not None:
            fabric.save(loop.save, state)
        fabric.barrier()
    finally:
        # Stock ddp's wrapper holds the process group, whose end must not come while Python frees this frame.
        state.clear()
        del model, optimizer, fabric, strategy
        gc.collect()
        dist.destroy_process_group()
    return seen


def looped(loop: Loop) -> dict[str, Any]:
    outcomes = on_ranks(loop.split.world_size, run, loop)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


@cache
def reference() -> dict[str, Any]:
    return looped(Loop())


SPLITS = [Split(world, 1, accumulate) for world in (1, 2, 3) for accumulate in (1, 2, 3)][1:]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_loop_gives_the_same_bytes_at_every_split(split):
    assert looped(Loop(split=split)) == reference()
    assert len(set(reference()["weights"])) == 10


class Gated(Network):
    """The Trainer's module of gated layers."""

    def __init__(self):
        super().__init__()
        self.gate, self.shift = (nn.Parameter(torch.linspace(-1, 1, HIDDEN)) for _ in range(2))

    def forward(self, x):
        return self.output(F.relu(self.hidden(x) * torch.sigmoid(self.gate) + self.shift))


@pytest.mark.parametrize("build", [Network, Gated])
def test_a_loop_gives_the_bytes_of_the_trainer(build):
    run_of_trainer = Run(
        split=Split(1, 24, 1), steps=9, samples=58, loader={"shuffle": True}, options={"global_batch": 24}, build=build
    )
    outcome = train(0, 1, free_port(), run_of_trainer)
    expected = reference() if build is Network else looped(Loop(gated=True))
    assert (outcome.weights, outcome.losses) == (expected["weights"], expected["losses"])


def test_stock_ddp_fails_the_same_check():
    loop = Loop(strategy="ddp", shuffle=False, samples=48, steps=8)
    ends = [looped(replace(loop, split=split))["weights"] for split in (Split(1, 24, 1), Split(3, 8, 1))]
    assert ends[0][0] == ends[1][0] and ends[0][-1] != ends[1][-1]


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 7, "options": {"global_batch": 4}},
        {"samples": 2, "options": {"global_batch": 4}},
        {"loss": "exact_mean", "clip": {"clip_val": 0.01}},
        {"loss": "two means", "clip": {}},
        {"dropout": 0.25, "workers": 1},
        {"gated": True},
        {"evaluate": 13},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_ranks_without_samples_losses_clipping_dropout_and_evaluation(change):
    whole = looped(Loop(**change))
    assert looped(Loop(split=Split(3, 1, 2), **change)) == whole
    if "evaluate" in change:
        assert whole["weights"] == reference()["weights"]
        assert {count for count, _ in whole["counts"]} == {13}
    if change.get("loss") == "exact_mean":
        assert whole["weights"] != reference()["weights"], "clipped by value"


@pytest.mark.parametrize("stop", [4, 6])
def test_a_loop_goes_on_within_an_epoch_at_another_split(tmp_path, stop):
    path = tmp_path / "stopped.ckpt"
    looped(Loop(split=Split(2, 1, 2), steps=stop, save=path))
    assert looped(Loop(split=Split(3, 1, 1), resume=path))["weights"] == reference()["weights"][stop:]


def test_the_namespace_that_stands_alone_gives_the_same_bytes():
    assert looped(Loop(split=Split(2, 1, 1), namespace="lightning_fabric")) == reference()


ON_GPUS = [{}, {"dropout": 0.25}, {"precision": "bf16-mixed"}, {"loss": "two means", "clip": {}}]


@pytest.mark.cuda
@pytest.mark.parametrize("change", ON_GPUS, ids=str)
def test_a_loop_on_one_gpu_has_the_bytes_of_the_cpu(change):
    assert looped(Loop(split=Split(1, 1, 2), accelerator="gpu", **change)) == looped(Loop(**change))


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.parametrize("change", ON_GPUS, ids=str)
def test_a_loop_on_two_gpus_has_the_bytes_of_the_cpu(change):
    assert looped(Loop(split=Split(2, 1, 1), accelerator="gpu", **change)) == looped(Loop(**change))


def run_a_stream(rank: int, world_size: int, port: int, order: str) -> tuple[list[bytes], list[float], list[int]]:
    """Module and optimizer set up one after the other, a schedule, a stream or batches of one's own; then evaluation."""
    ranks = given_ranks(rank, world_size, port)
    strategy = FabricDetStrategy(cluster_environment=ranks, global_batch=12)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Layers())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if order == "stream":
        loader = DataLoader(Reshuffled(46), batch_size=4, num_workers=1)
    else:
        data = spread_samples(46)
        loader = DataLoader(data, batch_sampler=BatchSampler(WeightedRandomSampler([1.0, 3.0] * 23, 40), 12, False))
    loader, other = fabric.setup_dataloaders(loader, DataLoader(InOrder(13), batch_size=4))
    weights, rates = [], []
    for _ in range(2):
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x), y, reduction="sum"))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            weights.append(bytes_of(model))
            rates.append(schedule.get_last_lr()[0])
    with torch.no_grad():
        labels = [label for _, y in other for label in y.tolist()]
    dist.destroy_process_group()
    return weights, rates, labels


@pytest.mark.parametrize("order", ["stream", "batches of one's own"])
def test_streams_samplers_and_schedules_in_a_loop(order):
    whole = on_ranks(1, run_a_stream, order)[0]
    ranks = on_ranks(3, run_a_stream, order)
    assert all((weights, rates) == whole[:2] for weights, rates, _ in ranks)
    assert (
        sorted(label for _, _, labels in ranks for label in labels)
        == sorted(whole[2])
        == sorted(InOrder(13).y.tolist())
    )
    assert len(set(whole[0])) == 8 and whole[1][-1] < whole[1][0]
