"""The ledger callback: it changes nothing, survives a kill, continues a resumed run, and refuses another run's directory."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.fault_guard import FaultGuard
from det_lightning.callbacks.replica_guard import ReplicaGuard
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from det_lightning.errors import InputError
from det_lightning.kernels.cpu import gemm_int8
from det_lightning.ledger.record import bits_float
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import PATIENCE_SECONDS, Background, Failed, in_new_process
from tests.claims.trainings import Run, train
from tests.cli.golden_cases import answer
from tests.replay.recorded import build


class _Slow(Callback):
    """Leaves time for a kill, and never comes to the end without one."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        time.sleep(0.05 if trainer.global_step < trainer.max_steps - 1 else 10 * PATIENCE_SECONDS)


class _RaisingNetwork(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("planted")


def fit(folder: Path, *, steps: int, resume: str | None = None, callback: Callback | None = None, ledger="ledger"):
    """One training with a checkpoint every third step."""
    quiet_lightning()
    module, loader = build()
    arguments = {name: value for name, value in QUIET_TRAINER.items() if name != "enable_checkpointing"}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DetStrategy(seed=4),
        max_steps=steps,
        callbacks=[
            *([callback] if callback else []),
            WeightLedger(folder / ledger),
            ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
        ],
        **arguments,
    )
    trainer.fit(module, loader, ckpt_path=resume)


def record_under_ddp(path: Path) -> None:
    quiet_lightning()
    module, loader = build()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DDPStrategy(),
        max_steps=5,
        callbacks=[WeightLedger(path)],
        **QUIET_TRAINER,
    )
    trainer.fit(module, loader)


def traces(path: Path) -> dict[int, str]:
    with LedgerReader(path) as reader:
        return {record.step: record.trace for record in reader.records()}


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


def test_an_exception_leaves_a_ledger_that_does_not_say_finished(tmp_path):
    with pytest.raises(Failed, match="planted"):
        in_new_process(fit, tmp_path, steps=9, callback=_RaisingNetwork())
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


def test_an_unknown_kind_is_refused_when_it_is_asked_for():
    with pytest.raises(InputError, match="activations"):
        WeightLedger("nowhere", kinds=("weights", "activations"))


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
        in_new_process(fit_deferring, tmp_path / "late", 8, callback=_RaisingNetwork())
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


class TwoOptimizers(LightningModule):
    """Two networks that are stepped one after the other, by hand, as in adversarial training."""

    def __init__(self, doubled_from: int | None):
        super().__init__()
        self.automatic_optimization = False
        self.doubled_from = doubled_from
        self.one, self.other = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 5 / 8 - 0.25)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for network, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            logits = network(x)
            if self.doubled_from is not None and self.trainer.global_step + 1 >= self.doubled_from:
                logits = logits * 2.0
            self.manual_backward(torch.nn.functional.cross_entropy(logits, y))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.one.parameters(), lr=0.25), torch.optim.SGD(self.other.parameters(), lr=0.125)]


def build_two(doubled_from: int | None = None):
    return TwoOptimizers(doubled_from), build()[1]


def fit_two(path: Path, strategy: str, doubled_from: int | None = None) -> None:
    quiet_lightning()
    module, loader = build_two(doubled_from)
    entry = "tests.callbacks.test_weight_ledger:build_two"
    callbacks = [WeightLedger(path, entry=entry, entry_arguments={"doubled_from": doubled_from})]
    chosen = DetStrategy(seed=4) if strategy == "det" else "auto"
    Trainer(accelerator="cpu", devices=1, strategy=chosen, max_steps=8, callbacks=callbacks, **QUIET_TRAINER).fit(
        module, loader
    )


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_every_step_of_several_optimizers_has_a_record(tmp_path, strategy):
    in_new_process(fit_two, tmp_path / "a", strategy)
    with LedgerReader(tmp_path / "a") as reader:
        assert (reader.first_step, reader.last_step, reader.verify_chain().sound) == (0, 8, True)
        records = [reader.leaves(record, "weights") for record in reader.records()]
        for step in range(1, 9):
            changed = {name for name in records[step] if records[step][name] != records[step - 1][name]}
            assert changed == {f"{'one' if step % 2 else 'other'}.{kind}" for kind in ("weight", "bias")}
        rates = [reader.record(step).agree["learning_rates"] for step in (1, 2)]
        assert rates == [["3fd0000000000000"], ["3fc0000000000000"]]


def test_a_change_is_found_in_the_step_of_the_second_optimizer(tmp_path):
    in_new_process(fit_two, tmp_path / "a", "det")
    in_new_process(fit_two, tmp_path / "b", "det", 4)
    code, out, err = in_new_process(answer, ["bisect", str(tmp_path / "a"), str(tmp_path / "b"), "--replay", "--json"])
    told = json.loads(out)
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, 4, "found"), err
    assert {each["name"] for each in told["first"]["tensors"]} == {"other.weight", "other.bias"}
    assert told["inside"]["difference"]["candidate"]["name"] == "aten.mul.Tensor"
    assert in_new_process(replay, tmp_path / "a").matched


class ClipsByHand(TwoOptimizers):
    """Clips the gradients of the first network only; keeps the norms before."""

    def __init__(self):
        super().__init__(None)
        self.norms = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        for network, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(network(x), y))
            if network is self.one:
                self.norms.append(self.trainer.strategy.gradient_norm().item())
                self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            optimizer.step()


def fit_clipping_by_hand(path):
    quiet_lightning()
    module, loader = ClipsByHand(), build()[1]
    options = {"accelerator": "cpu", "devices": 1, "strategy": DetStrategy(seed=4), "max_steps": 6, **QUIET_TRAINER}
    Trainer(callbacks=[WeightLedger(path)], **options).fit(module, loader)
    return module.norms


def test_clip_norms_are_recorded_with_the_step_they_belong_to_when_one_clips_by_hand(tmp_path):
    norms = in_new_process(fit_clipping_by_hand, tmp_path)
    with LedgerReader(tmp_path) as reader:
        clips = [record.agree["clip"] for record in reader.records()]
    assert [clip is not None for clip in clips] == [False, True, False, True, False, True, False]
    assert len({clip["norm"] for clip in clips if clip}) == 3
    # Of all gradients that stand there: those of the other network too.
    assert all(bits_float(clip["norm"]) <= norm for clip, norm in zip(clips[1::2], norms, strict=True))
    assert all(0.0 < bits_float(clip["coefficient"]) < 1.0 for clip in clips[1::2])


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
