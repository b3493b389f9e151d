"""What is recorded less often, or written later, is the same record; options that contradict each other are refused."""

from pathlib import Path

import pytest
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from det_lightning.errors import InputError
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.callbacks.recorded_runs import RaisingNetwork, fit, traces
from tests.claims.processes import Failed, in_new_process
from tests.replay.recorded import build


def test_an_unknown_kind_is_refused_when_it_is_asked_for():
    with pytest.raises(InputError, match="activations"):
        WeightLedger("nowhere", kinds=("weights", "activations"))


@pytest.mark.parametrize(
    "option", [{"kinds": {"weights": 1, "optimizer": 4}}, {"leaves_every_n_steps": 3}, {"keep_leaves": 2}]
)
def test_what_is_recorded_less_often_is_replayed_alike(tmp_path, option):
    in_new_process(fit_with_options, tmp_path / "sparse", option)
    in_new_process(fit, tmp_path, steps=9)
    with LedgerReader(tmp_path / "sparse") as sparse, LedgerReader(tmp_path / "ledger") as whole:
        assert sparse.verify_chain().sound
        for record in sparse.records():
            for kind, found in record.agree["roots"].items():
                if found is not None:
                    assert found == whole.record(record.step).agree["roots"][kind]
        rows = {kind: sum(kind in record.leaves for record in sparse.records()) for kind in ("weights", "optimizer")}
        kept = [record.step for record in sparse.records() if sparse.keeps_leaves(record, "weights")]
    expected = {"kinds": {"weights": 10, "optimizer": 3}, "leaves_every_n_steps": {"weights": 4, "optimizer": 4}}
    assert rows == expected.get(next(iter(option)), {"weights": 10, "optimizer": 10})
    every = option.get("leaves_every_n_steps", 1)
    assert kept == ([0, 8, 9] if "keep_leaves" in option else [*range(0, 10, every)])
    result = in_new_process(replay, tmp_path / "sparse", entry="tests.replay.recorded:build")
    assert result.matched and result.steps == 9


class DeferringLedger(WeightLedger):
    """As on a CUDA device, where digests are fetched while the next step runs."""

    @staticmethod
    def _defers(pl_module) -> bool:
        return True


def fit_deferring(folder: Path, steps: int, resume: str | None = None, callback: Callback | None = None) -> None:
    quiet_lightning()
    module, loader = build()
    arguments = {name: value for name, value in QUIET_TRAINER.items() if name != "enable_checkpointing"}
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    callbacks = [*([callback] if callback else []), DeferringLedger(folder / "ledger"), saver]
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=DetStrategy(seed=4), max_steps=steps, callbacks=callbacks, **arguments
    )
    trainer.fit(module, loader, ckpt_path=resume)


def test_records_that_are_written_one_step_late_are_the_same_also_after_an_exception_and_a_resume(tmp_path):
    in_new_process(fit, tmp_path / "at once", steps=8)
    expected = traces(tmp_path / "at once" / "ledger")
    with pytest.raises(Failed, match="planted"):
        in_new_process(fit_deferring, tmp_path / "late", 8, callback=RaisingNetwork())
    assert traces(tmp_path / "late" / "ledger") == {step: trace for step, trace in expected.items() if step <= 4}
    in_new_process(fit_deferring, tmp_path / "late", 8, str(tmp_path / "late" / "step=3.ckpt"))
    assert traces(tmp_path / "late" / "ledger") == expected
    with LedgerReader(tmp_path / "late" / "ledger") as late, LedgerReader(tmp_path / "at once" / "ledger") as once:
        assert late.closed and late.verify_chain().sound
        assert {each.step for each in late.checkpoints()} == {each.step for each in once.checkpoints()} == {3, 6}


def fit_with_options(path: Path, option: dict) -> None:
    quiet_lightning()
    module, loader = build()
    callbacks = [WeightLedger(path, **option)]
    strategy = DetStrategy(seed=4)
    Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=9, callbacks=callbacks, **QUIET_TRAINER).fit(
        module, loader
    )


def test_an_interval_below_one_is_refused():
    with pytest.raises(InputError, match="every 0 steps"):
        WeightLedger("nowhere", kinds={"weights": 0})
    with pytest.raises(InputError, match="leaves_every_n_steps"):
        WeightLedger("nowhere", leaves_every_n_steps=0)
    with pytest.raises(InputError, match="keep_leaves is 0"):
        WeightLedger("nowhere", keep_leaves=0)


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="without keep_leaves all leaves are kept"):
        WeightLedger("nowhere", keep_leaves_every_n_steps=10)
    with pytest.raises(InputError, match="give a multiple"):
        WeightLedger("nowhere", leaves_every_n_steps=4, keep_leaves=8, keep_leaves_every_n_steps=10)
