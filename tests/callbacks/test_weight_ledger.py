"""The ledger callback: it changes nothing, survives a kill, continues a resumed run, and refuses another run's directory."""

import itertools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.fault_guard import FaultGuard
from det_lightning.callbacks.replica_guard import ReplicaGuard
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.kernels.cpu import gemm_int8
from det_lightning.ledger.explanation import explanation
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.callbacks.recorded_runs import RaisingNetwork, fit, record_under_ddp, traces
from tests.claims.processes import PATIENCE_SECONDS, Background, Failed, in_new_process
from tests.claims.trainings import Run, train
from tests.replay.recorded import build


class _Slow(Callback):
    """Leaves time for a kill, and never comes to the end without one."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        time.sleep(0.05 if trainer.global_step < trainer.max_steps - 1 else 10 * PATIENCE_SECONDS)


def test_the_ledger_changes_no_bit_of_the_training(tmp_path):
    with_ledger = in_new_process(train, 0, 1, 0, Run(ledger=tmp_path / "ledger"))
    without = in_new_process(train, 0, 1, 0, Run())
    assert with_ledger.weights == without.weights
    assert with_ledger.losses == without.losses


def test_it_records_under_a_stock_strategy_what_that_strategy_knows(tmp_path):
    in_new_process(record_under_ddp, tmp_path / "ledger")
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.recipe["arithmetic"] == "stock DDPStrategy"
        assert reader.environment["engine"] == ("int8" if gemm_int8.is_fast() else "float64")
        assert (reader.first_step, reader.last_step, reader.closed) == (0, 5, True)
        assert reader.record(3).agree["sample_ids"] is None
        assert set(reader.leaves(reader.record(3), "gradients")) == {
            "first.bias",
            "first.weight",
            "second.bias",
            "second.weight",
        }


def test_a_killed_training_loses_at_most_one_record_and_goes_on_to_the_same_trace(tmp_path):
    in_new_process(fit, tmp_path / "whole", steps=12)
    killed = Background(fit, tmp_path / "killed", steps=12, callback=_Slow())
    ledger = tmp_path / "killed" / "ledger"
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and not (tmp_path / "killed" / "step=6.ckpt").exists():
            time.sleep(0.01)
        time.sleep(0.07)
    finally:
        assert killed.end() == -signal.SIGKILL
    with LedgerReader(ledger) as reader:
        report = reader.verify_chain()
        assert report.sound and not reader.closed
        last = reader.last_step
    assert 6 <= last < 12
    assert traces(ledger) == {
        step: trace for step, trace in traces(tmp_path / "whole" / "ledger").items() if step <= last
    }
    in_new_process(fit, tmp_path / "killed", steps=12, resume=str(tmp_path / "killed" / "step=6.ckpt"))
    with LedgerReader(ledger) as reader:
        assert reader.verify_chain().sound and reader.closed
    assert traces(ledger) == traces(tmp_path / "whole" / "ledger")


def test_a_torn_end_is_cut_off_with_a_warning_when_the_run_goes_on(tmp_path):
    in_new_process(fit, tmp_path, steps=5)
    lines = tmp_path / "ledger" / "ledger.jsonl"
    os.truncate(lines, lines.stat().st_size - 300)
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.torn_bytes > 0
        assert reader.verify_chain().torn
    in_new_process(fit, tmp_path, steps=7, resume=str(tmp_path / "step=3.ckpt"))
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.verify_chain().sound
        assert (reader.last_step, reader.torn_bytes) == (7, 0)


def test_a_fresh_run_refuses_a_directory_that_holds_a_ledger_and_harms_nothing(tmp_path):
    in_new_process(fit, tmp_path, steps=2)
    before = (tmp_path / "ledger" / "ledger.jsonl").read_bytes()
    with pytest.raises(Failed, match="already holds a ledger") as raised:
        in_new_process(fit, tmp_path, steps=2)
    assert raised.value.kind == "LedgerError"
    assert (tmp_path / "ledger" / "ledger.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    in_new_process(fit, tmp_path / "one", steps=4)
    in_new_process(fit, tmp_path / "two", steps=4, ledger="ledger")
    other = torch.load(tmp_path / "two" / "step=3.ckpt", weights_only=True)
    other["callbacks"]["WeightLedger"]["trace"] = "ab" * 32
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(Failed, match="holds another run"):
        in_new_process(fit, tmp_path / "one", steps=6, resume=str(tmp_path / "other.ckpt"))


def test_a_checkpoint_whose_state_is_not_the_recorded_one_is_told_and_no_step_is_blamed(tmp_path):
    in_new_process(fit, tmp_path / "whole", steps=6)
    in_new_process(fit, tmp_path / "sound", steps=3)
    shutil.copytree(tmp_path / "sound", tmp_path / "damaged")
    saved = torch.load(tmp_path / "damaged" / "step=3.ckpt", weights_only=True)
    saved["optimizer_states"][0]["state"][1]["momentum_buffer"].view(torch.int32)[3] ^= 1 << 20
    torch.save(saved, tmp_path / "damaged" / "step=3.ckpt")
    meaning = {}
    for name in ("sound", "damaged"):
        folder = tmp_path / name
        in_new_process(fit, folder, steps=6, resume=str(folder / "step=3.ckpt"))
        with LedgerReader(tmp_path / "whole" / "ledger") as whole, LedgerReader(folder / "ledger") as resumed:
            assert resumed.verify_chain().sound
            unlike = resumed.resumes[0].unlike
            assert unlike == (("optimizer first.bias.momentum_buffer",) if name == "damaged" else ())
            found = compare_ledgers(whole, resumed)
        meaning[name] = found.first and explanation(found.first)
    assert meaning["sound"] is None
    assert "the candidate was resumed after step 3 with another state" in meaning["damaged"]


def test_an_exception_leaves_a_ledger_that_does_not_say_finished(tmp_path):
    with pytest.raises(Failed, match="planted"):
        in_new_process(fit, tmp_path, steps=9, callback=RaisingNetwork())
    with LedgerReader(tmp_path / "ledger") as reader:
        assert (reader.last_step, reader.closed) == (4, False)
        assert reader.verify_chain().sound


def fit_with_one_callback(path: Path, second: str):
    """A fit, and a second one with the same callback object: of the same Trainer, or of another."""
    quiet_lightning()
    module, loader = build()
    ledger = WeightLedger(path)

    def trainer(steps: int) -> Trainer:
        strategy = DetStrategy(seed=4)
        return Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, callbacks=[ledger], **QUIET_TRAINER
        )

    first = trainer(4)
    first.fit(module, loader)
    if second == "same":
        first.fit_loop.epoch_loop.max_steps = 8
    (first if second == "same" else trainer(4)).fit(module, loader)


def test_a_second_fit_of_a_trainer_continues_its_ledger_and_one_of_another_trainer_is_refused(tmp_path):
    in_new_process(fit_with_one_callback, tmp_path / "same", "same")
    with LedgerReader(tmp_path / "same") as reader:
        assert [record.step for record in reader.records()] == list(range(9))
        assert reader.closed and reader.verify_chain().sound
    with pytest.raises(Failed, match="already holds a ledger"):
        in_new_process(fit_with_one_callback, tmp_path / "other", "other")
    with LedgerReader(tmp_path / "other") as reader:
        assert reader.closed and not reader.resumes


def fit_without_then_with(folder: Path) -> None:
    quiet_lightning()
    module, loader = build()
    for steps, callbacks in ((4, []), (7, [WeightLedger(folder / "ledger")])):
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=DetStrategy(seed=4),
            max_steps=steps,
            callbacks=callbacks,
            **QUIET_TRAINER,
        )
        trainer.fit(module, loader, ckpt_path=folder / "saved.ckpt" if callbacks else None)
        trainer.save_checkpoint(folder / "saved.ckpt")


def test_a_ledger_may_begin_at_a_checkpoint_that_has_none(tmp_path):
    in_new_process(fit_without_then_with, tmp_path)
    in_new_process(fit, tmp_path / "whole", steps=7)
    with LedgerReader(tmp_path / "ledger") as reader, LedgerReader(tmp_path / "whole" / "ledger") as whole:
        assert (reader.first_step, reader.last_step, reader.resumed_from) == (4, 7, None)
        assert reader.record(4).agree["roots"]["weights"] == whole.record(4).agree["roots"]["weights"]
        assert reader.record(7).agree == whole.record(7).agree


def fit_in_started_processes(path: Path, start_method: str) -> None:
    quiet_lightning()
    module, loader = build()
    strategy = DetStrategy(seed=4, start_method=start_method, global_batch=12)
    callbacks = [WeightLedger(path)]
    Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=5, callbacks=callbacks, **QUIET_TRAINER).fit(
        module, loader
    )


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_lightning_starts_write_one_ledger_and_the_same(tmp_path, start_method):
    in_new_process(fit_in_started_processes, tmp_path / "two", start_method)
    in_new_process(fit, tmp_path, steps=5)
    assert traces(tmp_path / "two") == traces(tmp_path / "ledger")


def fit_in_every_order(folder: Path) -> tuple[int, list[str]]:
    """How many orders of callbacks there are, and the distinct final traces of the same training under all of them."""
    quiet_lightning()
    found = set()
    orders = list(itertools.permutations(range(4)))
    for number, order in enumerate(orders):
        saver = ModelCheckpoint(folder / f"saved-{number}", every_n_train_steps=2, save_top_k=-1, filename="{step}")
        guards = FaultGuard(products_every_n_steps=2), ReplicaGuard()
        path = folder / str(number)
        callbacks = [(WeightLedger(path), *guards, saver)[place] for place in order]
        arguments = QUIET_TRAINER | {"enable_checkpointing": True}
        module, loader = build()
        Trainer(
            accelerator="cpu", devices=1, strategy=DetStrategy(seed=4), max_steps=4, callbacks=callbacks, **arguments
        ).fit(module, loader)
        with LedgerReader(path) as reader:
            assert reader.verify_chain().sound and reader.closed and len(reader.checkpoints()) == 2
            found.add(reader.record(4).trace)
    return len(orders), sorted(found)


def test_callbacks_in_any_order_record_the_same_run(tmp_path):
    orders, traces = in_new_process(fit_in_every_order, tmp_path)
    assert (orders, len(traces)) == (24, 1)


def two_ledgers_in_one_directory(path: Path) -> None:
    quiet_lightning()
    module, loader = build()
    callbacks = [WeightLedger(path), OtherLedger(path)]
    options = {"accelerator": "cpu", "devices": 1, "strategy": DetStrategy(seed=4), "max_steps": 2, **QUIET_TRAINER}
    Trainer(callbacks=callbacks, **options).fit(module, loader)


class OtherLedger(WeightLedger):
    @property
    def state_key(self) -> str:
        return "other"


def test_two_ledgers_of_one_trainer_need_two_directories(tmp_path):
    with pytest.raises(Failed, match="already holds a ledger"):
        in_new_process(two_ledgers_in_one_directory, tmp_path / "ledger")
