"""How a run is built again: from a function, from a LightningCLI config, and never from code that a ledger smuggles in."""

import importlib
import sys
from pathlib import Path

import pytest

from det_lightning.errors import InputError
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay
from det_lightning.replay.entry import build
from tests.claims.processes import in_new_process

CONFIG = """
seed_everything: 5
model:
  class_path: tests.replay.configured.Network
  init_args:
    rate: 0.25
data:
  class_path: tests.replay.configured.Data
  init_args:
    samples: 24
"""


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("os:system", {"command": "touch harmed"}),
        ("os:remove", {"path": "kept"}),
        ("subprocess:call", {"args": ["touch", "harmed"]}),
        ("builtins:exec", {}),
        ("shutil:rmtree", {"path": "."}),
        ("numpy:load", {"file": "x", "allow_pickle": True}),
        ("posixpath:join", {}),
        ("sys:exit", {}),
    ],
)
def test_an_entry_outside_the_working_directory_is_refused_unless_it_is_given(
    tmp_path, monkeypatch, function, arguments
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").touch()
    with pytest.raises(InputError, match="does not lie in"):
        build({"function": function, "arguments": arguments})
    assert (tmp_path / "kept").exists() and not (tmp_path / "harmed").exists()


def test_code_that_is_installed_below_the_working_directory_is_foreign_too(tmp_path, monkeypatch):
    folder = tmp_path / "venv" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "smuggled_run.py").write_text("def build():\n    raise SystemExit('called')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match="does not lie in"):
        build({"function": "smuggled_run:build"})
    with pytest.raises(SystemExit, match="called"):
        build({}, "smuggled_run:build")
    sys.modules.pop("smuggled_run", None)


def test_an_override_that_is_the_recorded_function_keeps_its_arguments():
    entry = {"function": "tests.replay.recorded:build", "arguments": {"rate": {"float64": "3fe0000000000000"}}}
    assert build(entry).module.rate == 0.5
    assert build(entry, entry["function"]).module.rate == 0.5
    assert build(entry, "tests.replay.recorded:build_changed").module.rate == 0.25


def test_a_third_item_is_the_callbacks_that_change_the_training():
    built = build({"function": "tests.replay.planted:build", "arguments": {"average": True}})
    assert [type(each).__name__ for each in built.callbacks] == ["Average"]


def test_a_lightning_cli_config_is_an_entry(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    in_new_process(record_from, config, tmp_path / "ledger")
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.entry["function"] == str(config)
    result = in_new_process(replay, tmp_path / "ledger")
    assert result.matched and result.steps == 4
    config.write_text(CONFIG.replace("0.25", "0.5"))
    result = in_new_process(replay, tmp_path / "ledger")
    assert not result.matched and result.first.step == 1


def record_from(config: Path, ledger: Path) -> None:
    from det_lightning.callbacks.weight_ledger import WeightLedger
    from lightning.pytorch import Trainer

    from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
    from det_lightning.strategies.lightning_strategy import DetStrategy

    quiet_lightning()
    built = build({}, str(config))
    callbacks = [WeightLedger(ledger, entry=str(config))]
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=DetStrategy(seed=1), max_steps=4, callbacks=callbacks, **QUIET_TRAINER
    )
    trainer.fit(built.module, built.data)


def test_a_config_that_is_missing_or_wrong_says_so(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        build({}, str(tmp_path / "nothing.yaml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: 5\n")
    with pytest.raises(InputError, match="does not accept"):
        build({}, str(wrong))
