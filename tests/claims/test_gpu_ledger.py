"""Ledgers of trainings on GPUs: the CPU's record for record, no bit of the training moved, differences found by replays."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from det_lightning.callbacks.fault_injector import FaultInjector
from det_lightning.callbacks.started_digests import StartedDigests, digests_of
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER
from det_lightning.strategies.given_ranks import given_ranks
from tests.callbacks import sharded_trainings as sharded
from tests.callbacks import test_fault_drills
from tests.claims.processes import in_new_process, on_ranks
from tests.claims.test_gpu_training import RUNS
from tests.claims.trainings import Split, train
from tests.replay.planted import PLANTED_STEP, record_on_ranks
from tests.replay.test_planted_divergences import ALL, Planted, plant_and_bisect

pytestmark = pytest.mark.cuda

ON_GPU = {"accelerator": "gpu"}
RECORDED = ["sgd", "adamw", "dropout", "bf16-true", "bf16-mixed"]


def recorded(path, name: str, accelerator: str, split: Split | None = None) -> list[tuple[str, dict]]:
    """(trace, agreeing fields) of each record of one of the small trainings."""
    run, split = RUNS[name], split or Split(1, 24, 1)
    run = replace(run, split=split, ledger=path, trainer={**run.trainer, "accelerator": accelerator})
    on_ranks(split.world_size, train, run)
    with LedgerReader(path) as reader:
        assert reader.verify_chain().sound and reader.closed
        assert reader.environment["device"].startswith("cuda" if accelerator == "gpu" else "cpu")
        return [(record.trace, dict(record.agree)) for record in reader.records()]


@pytest.mark.parametrize("name", RECORDED)
def test_a_ledger_of_one_gpu_is_the_cpus_record_for_record(tmp_path, name):
    on_gpu, on_cpu = (recorded(tmp_path / kind, name, kind) for kind in ("gpu", "cpu"))
    assert [agree for _, agree in on_gpu] == [agree for _, agree in on_cpu]
    assert on_gpu == on_cpu and len(on_gpu) == RUNS[name].steps + 1


@pytest.mark.multi_gpu
@pytest.mark.parametrize("split", [Split(2, 12, 1), Split(2, 4, 3)], ids=str)
def test_a_ledger_of_two_gpus_is_the_cpus_record_for_record(tmp_path, split):
    assert recorded(tmp_path / "gpu", "adamw", "gpu", split) == recorded(tmp_path / "cpu", "adamw", "cpu")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_ledger_moves_no_bit_of_a_stock_training_on_a_gpu(tmp_path, name):
    run = replace(RUNS[name], strategy="ddp", trainer=ON_GPU)
    ((without,), (with_ledger,)) = (
        on_ranks(1, train, each) for each in (run, replace(run, ledger=tmp_path / "ledger"))
    )
    assert with_ledger.weights == without.weights and with_ledger.losses == without.losses
    assert with_ledger.optimizer == without.optimizer


@pytest.mark.multi_gpu
def test_a_ledger_moves_no_bit_of_ddp_on_two_gpus(tmp_path):
    run = replace(RUNS["adamw"], split=Split(2, 12, 1), strategy="ddp", trainer=ON_GPU)
    without, with_ledger = (on_ranks(2, train, each)[0] for each in (run, replace(run, ledger=tmp_path / "ledger")))
    assert with_ledger.weights == without.weights and with_ledger.losses == without.losses


def test_digests_see_the_tensors_of_the_moment_they_were_asked_for():
    tensors = {str(n): torch.randn(n, 1000, device="cuda") for n in (1, 7, 3000)}
    expected = digests_of({name: tensor.cpu() for name, tensor in tensors.items()})
    started = StartedDigests.of_whole(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert started.result() == expected
    assert digests_of(tensors) != expected


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_one_flipped_bit_on_a_gpu_is_found_by_replays_on_it(tmp_path, strategy):
    options = {**ON_GPU, "strategy": strategy}
    in_new_process(record_on_ranks, tmp_path / "reference", plant="", **options)
    fault = (PLANTED_STEP, "middle.weight", 8, 13)
    case = Planted("", PLANTED_STEP, {"weights"}, options={**options, "fault": fault})
    code, told = in_new_process(plant_and_bisect, tmp_path / "reference", tmp_path / "candidate", case)
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, PLANTED_STEP, "transient"), told["inside"]
    flip = told["flip"]["flip"]
    assert (told["flip"]["tensor"], flip["index"], flip["bit"]) == ("middle.weight", [1, 2], 13)


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_changed_code_is_located_inside_its_step_on_a_gpu(tmp_path, strategy):
    options = {**ON_GPU, "strategy": strategy}
    in_new_process(record_on_ranks, tmp_path / "reference", plant="", **options)
    case = Planted("rate", 1, {"weights"}, options=options)
    code, told = in_new_process(plant_and_bisect, tmp_path / "reference", tmp_path / "candidate", case)
    inside = told["inside"]
    assert (code, told["first"]["step"], inside["verdict"]) == (1, 1, "found"), json.dumps(inside)
    assert inside["difference"]["candidate"]["phase"] == "update"
    assert {each["name"] for each in told["first"]["roots"]} <= ALL


def test_drills_on_a_gpu_have_the_outcomes_of_the_cpu(tmp_path):
    (on_gpu, on_cpu) = (in_new_process(test_fault_drills.all_drills, tmp_path / kind, kind) for kind in ("gpu", "cpu"))
    assert on_gpu == on_cpu


@pytest.mark.multi_gpu
@pytest.mark.parametrize("lasting", [False, True])
def test_a_flip_in_flight_between_gpus_is_named(tmp_path, lasting):
    injector = FaultInjector(3, "second.weight", 7, 11, rank=1, kind="digits in flight", lasting=lasting)
    faults = on_ranks(2, test_fault_drills.two_ranks, tmp_path / "ledger", injector, accelerator="gpu")
    told = [each[0] for each in faults]
    assert told[0] == told[1] and (told[0]["rank"], told[0]["kind"]) == (1, "digits in flight")
    assert told[0]["verdict"] == ("persistent" if lasting else "transient")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("strategy", ["det", "ddp"])
def test_a_run_of_two_gpus_is_replayed_on_two_gpus(tmp_path, strategy):
    in_new_process(record_on_ranks, tmp_path / "run", plant="", world=2, **ON_GPU, strategy=strategy)
    result = in_new_process(replay, tmp_path / "run", world=None, out=tmp_path / "again")
    assert result.matched, result.first
    with LedgerReader(tmp_path / "again") as again:
        assert again.environment["device"].startswith("cuda") and again.environment["world_size"] == 2


def fit_on_gpus(rank, world_size, port, path, kind):
    """The model of the sharded tests, every batch on every rank."""
    strategy = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={torch.nn.Linear}),
        "fsdp one flat parameter": lambda: "fsdp",
        "fully_shard": lambda: ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
    }[kind]()
    sharded.fit(
        path,
        devices=world_size,
        accelerator="gpu",
        strategy=strategy,
        plugins=[given_ranks(rank, world_size, port)],
    )
    dist.destroy_process_group()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["fsdp", "fsdp one flat parameter", "fully_shard"])
def test_a_sharded_training_on_gpus_has_the_digests_of_ddp(tmp_path, kind):
    for name in ("ddp", kind):
        on_ranks(2, fit_on_gpus, tmp_path / name, name)
    with LedgerReader(tmp_path / "ddp") as whole, LedgerReader(tmp_path / kind) as cut:
        assert cut.verify_chain().sound and (cut.first_step, cut.last_step) == (0, sharded.STEPS)
        first = [reader.record(0).agree["roots"] for reader in (whole, cut)]
        assert first[0] == first[1]
        assert whole.recipe["model"] == cut.recipe["model"]
        for name in ("weights", "gradients", "optimizer"):
            assert set(whole.leaves(whole.record(2), name)) == set(cut.leaves(cut.record(2), name))
        # Two ranks with equal gradients: their mean is exact, so the sharded step is the same step.
        assert [r.agree["roots"] for r in cut.records()] == [r.agree["roots"] for r in whole.records()]


@pytest.mark.multi_gpu
def test_fsdp_records_change_no_bit_of_the_training(tmp_path):
    weights = [on_ranks(2, end_of_fsdp, path)[0] for path in (None, tmp_path / "ledger")]
    assert weights[0] == weights[1]


def end_of_fsdp(rank, world_size, port, path):
    module = sharded.Module()
    trainer = Trainer(
        accelerator="gpu",
        devices=world_size,
        strategy="fsdp",
        plugins=[given_ranks(rank, world_size, port)],
        max_epochs=1,
        callbacks=[] if path is None else [WeightLedger(path)],
        **QUIET_TRAINER,
    )
    loader = torch.utils.data.DataLoader([(sharded.batch(step),) for step in range(8)], batch_size=None)
    trainer.fit(module, loader)
    held = {name: parameter.detach().cpu().numpy().tobytes() for name, parameter in module.named_parameters()}
    dist.destroy_process_group()
    return held
