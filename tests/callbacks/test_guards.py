"""The live guards: one follows a reference ledger, the other compares the ranks' copies; both say step, place and tensor."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.ledger_guard import LedgerGuard
from det_lightning.callbacks.replica_guard import ReplicaGuard
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from det_lightning.distributed.replicas import Drift, compare_copies
from det_lightning.errors import InputError
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.given_ranks import given_ranks
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import Failed, in_new_process, on_ranks
from tests.replay.recorded import build

STEPS = 10
FAULT = (6, "first.weight", 29, 13)


def follow(
    folder: Path, name: str, *, guard: dict | None = None, fault=None, steps=STEPS, guard_first=False, **options
):
    """Trains, guarded by the ledger `reference`, and returns (last step, warnings of the guard, difference found)."""
    quiet_lightning()
    module, loader = build(**options)
    callbacks = [FaultInjector(*fault)] if fault else []
    callbacks.append(WeightLedger(folder / name))
    follower = None
    if guard is not None:
        follower = LedgerGuard(folder / "reference", **guard)
        callbacks.insert(0 if guard_first else len(callbacks), follower)
    arguments = QUIET_TRAINER | {"logger": CSVLogger(folder / f"{name}-log"), "log_every_n_steps": 2}
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=DetStrategy(seed=4), max_steps=steps, callbacks=callbacks, **arguments
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    told = [
        str(each.message) for each in caught if "LedgerGuard" in str(each.message) or "leaves the" in str(each.message)
    ]
    return trainer.global_step, told, follower and follower.difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    in_new_process(follow, folder, "reference")
    return folder


def test_a_run_that_follows_its_reference_is_left_alone_also_beyond_its_end(folder):
    step, told, difference = in_new_process(follow, folder, "same", guard={}, steps=STEPS + 3)
    assert (step, told, difference) == (STEPS + 3, [], None)


def test_the_first_difference_stops_the_run_and_is_dumped(folder):
    dump = folder / "dump"
    step, told, difference = in_new_process(follow, folder, "flipped", guard={"dump": dump}, fault=FAULT)
    assert (step, difference.step) == (6, 6)
    assert len(told) == 1 and "at step 6: weights differs, first weights first.weight" in told[0]
    kept = torch.load(dump / "step-6" / "tensors.pt", weights_only=True)
    assert set(kept) == {"weights first.weight"}
    batch = torch.load(dump / "step-6" / "batch-rank-0.pt", weights_only=True)
    assert batch[0].shape == (12, 8)
    assert json.loads((dump / "step-6" / "difference.json").read_text())["last_match"] == 5
    with LedgerReader(folder / "flipped") as reader:
        assert reader.last_step == 6


def test_it_can_go_on_with_one_warning_or_raise(folder):
    step, told, _ = in_new_process(follow, folder, "warned", guard={"action": "warn"}, fault=FAULT)
    assert (step, len(told)) == (STEPS, 1)
    with pytest.raises(Failed, match="at step 6") as raised:
        in_new_process(follow, folder, "raised", guard={"action": "raise"}, fault=FAULT)
    assert raised.value.kind == "DivergenceError"


def test_another_recipe_is_told_before_the_first_step(folder):
    step, told, _ = in_new_process(follow, folder, "faster", guard={}, rate=0.5)
    assert step == 1 and "the recipe is not that of" in told[0] and "at step 1" in told[1]


def test_a_guard_without_a_ledger_before_it_is_refused(folder):
    with pytest.raises(Failed, match="place one before it"):
        in_new_process(follow, folder, "order", guard={}, guard_first=True)
    with pytest.raises(InputError, match="halt"):
        LedgerGuard("anywhere", action="halt")


def test_roots_and_divergence_reach_the_loggers(folder):
    in_new_process(follow, folder, "logged", guard={"action": "warn"}, fault=FAULT)

    def traces(name):
        rows = [
            line.split(",") for line in next((folder / f"{name}-log").rglob("metrics.csv")).read_text().splitlines()
        ]
        column, step = rows[0].index("ledger/trace"), rows[0].index("step")
        return {int(row[step]): float(row[column]) for row in rows[1:] if row[column]}, rows[0]

    reference, _ = traces("reference")
    logged, heads = traces("logged")
    assert [step for step in sorted(reference) if reference[step] != logged[step]] == [6, 8, 10]
    assert all(0 <= value < 1 for value in reference.values())
    assert "ledger/first_divergent_step" in heads and "ledger/weights" in heads


def train_guarded(rank: int, world: int, port: int, strategy: str, fault, kinds) -> int:
    quiet_lightning()
    module, loader = build()
    cluster = given_ranks(rank, world, port)
    chosen = {
        "det": lambda: DetStrategy(cluster_environment=cluster, seed=4, check_replicas=False),
        "ddp": lambda: DDPStrategy(cluster_environment=cluster, process_group_backend="gloo"),
    }[strategy]()
    callbacks = [*([FaultInjector(*fault[:4], rank=fault[4])] if fault else []), ReplicaGuard(kinds)]
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=chosen, max_steps=STEPS, callbacks=callbacks, **QUIET_TRAINER
    )
    trainer.fit(module, loader)
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["det", "ddp"])
def test_c59_a_bit_that_flips_on_one_rank_stops_the_run_with_step_rank_and_tensor(strategy):
    """Weights that drift apart along the data-parallel ranks."""
    fault = (6, "second.weight", 7, 3, 2)
    with pytest.raises(Failed, match=r"after step 6 the replicas differ: rank 2: weights second\.weight\.") as raised:
        on_ranks(3, train_guarded, strategy, fault, ("weights", "optimizer"))
    assert raised.value.kind == "ReplicaError"


def test_sound_replicas_run_to_the_end_and_an_interval_delays_the_notice():
    assert on_ranks(2, train_guarded, "det", None, ("weights",)) == [STEPS, STEPS]
    with pytest.raises(
        Failed, match=r"after step 8 the replicas differ: rank 1: .* which side is wrong cannot be told"
    ):
        on_ranks(2, train_guarded, "det", (6, "second.weight", 7, 3, 1), {"weights": 4})


def test_copies_are_judged_by_the_majority():
    a, b = {"x": b"1", "y": b"2"}, {"x": b"1", "y": b"3"}
    assert compare_copies([a, a, a]) is None
    assert compare_copies([a, b, a]) == Drift({1: ("y",)}, certain=True)
    assert compare_copies([a, b]) == Drift({1: ("y",)}, certain=False)
    assert compare_copies([a, {"x": b"1"}, a]) == Drift({1: ("y",)}, certain=True)
