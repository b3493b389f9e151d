"""Optimizers that are stepped by hand, one after the other: every step of each is a step of the ledger."""

import json
from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.weight_ledger import WeightLedger
from lightning.pytorch import LightningModule, Trainer

from det_lightning.ledger.record import bits_float
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
from det_lightning.strategies.lightning_strategy import DetStrategy
from tests.claims.processes import in_new_process
from tests.cli.golden_cases import answer
from tests.replay.recorded import build


class TwoOptimizers(LightningModule):
    """Two networks that are stepped one after the other, by hand, as in adversarial training."""

    def __init__(self, doubled_from: int | None, kind: type = torch.optim.SGD):
        super().__init__()
        self.kind = kind
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
        return [self.kind(self.one.parameters(), lr=0.25), self.kind(self.other.parameters(), lr=0.125)]


def build_two(doubled_from: int | None = None):
    return TwoOptimizers(doubled_from), build()[1]


def build_two_adams(doubled_from: int | None = None):
    return TwoOptimizers(doubled_from, torch.optim.Adam), build()[1]


def fit_two(path: Path, strategy: str, doubled_from: int | None = None, built_by: str = "build_two") -> None:
    quiet_lightning()
    module, loader = globals()[built_by](doubled_from)
    entry = f"tests.callbacks.test_ledger_of_several_optimizers:{built_by}"
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


@pytest.mark.parametrize("built_by", ["build_two", "build_two_adams"])
def test_a_change_is_found_in_the_step_of_the_second_optimizer(tmp_path, built_by):
    """Records are made within `training_step` here, where calls are covered or refused; Adam's count of steps is digested
    in a way of its own."""
    in_new_process(fit_two, tmp_path / "a", "det", built_by=built_by)
    in_new_process(fit_two, tmp_path / "b", "det", 4, built_by=built_by)
    code, out, err = in_new_process(answer, ["bisect", str(tmp_path / "a"), str(tmp_path / "b"), "--replay", "--json"])
    told = json.loads(out)
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, 4, "found"), err
    changed = {each["name"] for each in told["first"]["tensors"] if each["kind"] != "optimizer"}
    assert changed == {"other.weight", "other.bias"}
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
