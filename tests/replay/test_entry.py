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
from tests.replay import configured

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
        ("det_lightning.replay.entry:build", {"entry": {}, "override": "os:system"}),
        ("det_lightning.replay.golden:record_golden", {"path": "harmed", "entry": "os:system"}),
        ("det_lightning.demo.main:main", {"export": "harmed"}),
        ("det_lightning.demo.network:load_digits", {}),
        ("local_run:system", {"command": "touch harmed"}),
        ("local_run:Path.unlink", {}),
        ("local_run:quick", {}),
    ],
)
def test_an_entry_outside_the_working_directory_is_refused_unless_it_is_given(
    tmp_path, monkeypatch, function, arguments
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").touch()
    (tmp_path / "local_run.py").write_text(
        "from functools import partial\nfrom os import system\nfrom pathlib import Path\n"
        "quick = partial(system, 'touch harmed')\n"
    )
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=r"does not lie in|cannot be imported"):
        build({"function": function, "arguments": arguments})
    sys.modules.pop("local_run", None)
    assert (tmp_path / "kept").exists() and not (tmp_path / "harmed").exists()


def test_the_entry_of_the_demonstration_is_this_packages_own():
    assert build({"function": "det_lightning.demo.network:digits_run"}).module is not None


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
    assert [type(each).__name__ for each in built.callbacks] == ["Average", "Foreign"]


def test_a_lightning_cli_config_is_an_entry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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


def test_the_classes_of_a_config_are_found_in_the_working_directory_as_by_the_console_script(tmp_path, monkeypatch):
    """The console script's path begins with the folder that the script lies in."""
    source = Path(configured.__file__).read_text()
    (tmp_path / "mine_in_config.py").write_text(source)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("tests.replay.configured", "mine_in_config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    assert build({"function": "config.yaml"}).module.rate == 0.25


CALLBACKS = """
trainer:
  callbacks:
    - class_path: tests.replay.configured.Shrinking
    - class_path: det_lightning.WeightLedger
      init_args:
        path: elsewhere
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
"""


def test_the_callbacks_of_a_config_that_may_change_the_training_belong_to_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG + CALLBACKS)
    assert in_new_process(record_from, config, tmp_path / "ledger") == ["Shrinking"]
    assert in_new_process(replay, tmp_path / "ledger").matched
    config.write_text(CONFIG)
    assert not in_new_process(replay, tmp_path / "ledger").matched


def record_from(config: Path, ledger: Path) -> list[str]:
    from det_lightning.callbacks.weight_ledger import WeightLedger
    from lightning.pytorch import Trainer

    from det_lightning.replay.run import QUIET_TRAINER, quiet_lightning
    from det_lightning.strategies.lightning_strategy import DetStrategy

    quiet_lightning()
    built = build({}, str(config))
    callbacks = [*built.callbacks, WeightLedger(ledger, entry=str(config))]
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=DetStrategy(seed=1), max_steps=4, callbacks=callbacks, **QUIET_TRAINER
    )
    trainer.fit(built.module, built.data)
    return [type(each).__name__ for each in built.callbacks]


@pytest.mark.parametrize("name", ["runs.stranger.smuggled:build", "runs/stranger/config.yaml", "{outside}/config.yaml"])
def test_what_a_ledger_brought_along_is_refused_unless_it_is_given(tmp_path, monkeypatch, name):
    stranger, outside = tmp_path / "here/runs/stranger", tmp_path / "outside"
    stranger.mkdir(parents=True)
    outside.mkdir()
    (stranger / "ledger.jsonl").touch()
    code = "raise RuntimeError('its code was run')\n"
    (stranger / "smuggled.py").write_text(code)
    for folder in (stranger, outside):
        (folder / "config.yaml").write_text("model:\n  class_path: runs.stranger.smuggled.Network\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    importlib.invalidate_caches()
    name = name.format(outside=outside)
    with pytest.raises(InputError, match="or lies in a ledger"):
        build({"function": name})
    with pytest.raises((RuntimeError, InputError), match=r"its code was run|what is wrong stands above"):
        build({}, name)
    for module in [each for each in sys.modules if each == "runs" or each.startswith("runs.")]:
        del sys.modules[module]


@pytest.mark.parametrize("part", [{"arguments": "rate"}, {"arguments": [1]}, {"trainer": "x"}])
def test_an_entry_of_wrong_types_is_refused(part):
    with pytest.raises(InputError, match="is not sound"):
        build({"function": "tests.replay.recorded:build"} | part)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("..:x", "cannot be imported"),
        (":build", "cannot be imported"),
        ("tests.replay.recorded:STEPS", "is a int, not a function"),
        ("x" * 5000 + ".yaml", "does not exist"),
        ("a\x00.yaml", "does not exist"),
    ],
)
def test_a_name_that_is_no_entry_is_refused_by_name(name, message):
    with pytest.raises(InputError, match=message):
        build({"function": name})


def test_a_config_that_is_missing_or_wrong_says_so(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        build({}, str(tmp_path / "nothing.yaml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: 5\n")
    with pytest.raises(InputError, match="does not accept"):
        build({}, str(wrong))
