"""A ledger from anybody: what its header says of a run is checked before anything is started from it."""

import json

import pytest
import torch

from det_lightning.cli import exit_codes
from tests.claims.processes import in_new_process
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import write_run

RECIPE = {"arithmetic": "det", "precision": "32-true", "data": {"global_batch": 12, "seed": 4, "steps_per_epoch": 5}}
SPLIT = {"world_size": 1, "accumulate": 1}


@pytest.mark.parametrize(
    ("recipe", "environment", "message"),
    [
        (RECIPE, {"world_size": 10**9, "accumulate": 1}, "at most 256 processes"),
        (RECIPE, {"world_size": 1, "accumulate": 10**9}, "at most 256 processes"),
        (RECIPE, {"world_size": "../..", "accumulate": [1]}, "at most 256 processes"),
        (RECIPE, {"world_size": True, "accumulate": 1}, "at most 256 processes"),
        (RECIPE, {}, "only runs of Lightning's Trainer can be replayed"),
        ({"arithmetic": ["det"]}, SPLIT, "cannot be replayed"),
        ({"arithmetic": "stock DeepSpeedStrategy"}, SPLIT, "cannot be replayed"),
        ({}, SPLIT, "cannot be replayed"),
        pytest.param(
            {"arithmetic": "stock SingleDeviceStrategy", "precision": "32-true", "data": None},
            SPLIT | {"device": "cuda:0"},
            "1 rank needs as many GPUs, of which there are 0 here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (RECIPE | {"data": None}, SPLIT, "cannot be replayed"),
        (RECIPE, SPLIT | {"recording": {"weights": 0}}, "every 0 steps"),
        (RECIPE, SPLIT | {"recording": {"../weights": 1}}, "does not know ../weights"),
        (RECIPE | {"precision": "17-true"}, SPLIT, "17-true"),
        (RECIPE | {"data": RECIPE["data"] | {"global_batch": -1}}, SPLIT, "global_batch"),
    ],
)
def test_a_header_that_no_run_wrote_cannot_be_judged_and_starts_nothing(tmp_path, recipe, environment, message):
    ledger = write_run(tmp_path / "a", 4, recipe=recipe, environment=environment)
    code, out, err = in_new_process(
        answer, ["replay", str(ledger), "--to", "2", "--entry", "tests.replay.recorded:build"]
    )
    assert code == exit_codes.CANNOT_JUDGE, (out, err)
    assert message in err and "Traceback" not in err and err.count("\n") <= 3


def test_a_checkpoint_line_that_leads_elsewhere_is_not_started_from(tmp_path):
    from det_lightning.ledger.kept_checkpoints import nearest_checkpoint
    from det_lightning.ledger.store import LedgerReader, LedgerWriter
    from tests.ledger.example_runs import append_steps

    (tmp_path / "secret").write_text("not a checkpoint of this run")
    writer = LedgerWriter.create(tmp_path / "a", recipe={}, environment={}, entry={})
    append_steps(writer, range(4))
    for path, digest in (
        ("/etc/passwd", "00" * 32),
        (str(tmp_path / "secret"), "ab" * 32),
        ("../../../../dev/zero", ""),
    ):
        writer.checkpoint(2, path, digest)
    writer.close()
    with LedgerReader(tmp_path / "a") as reader:
        assert nearest_checkpoint(reader, 3) is None


def test_an_entry_of_wrong_types_cannot_be_judged(tmp_path):
    for number, entry in enumerate(
        ({"function": 5}, {"function": ["os", "system"]}, {"function": "tests.replay.recorded:build", "arguments": [1]})
    ):
        folder = tmp_path / str(number)
        ledger = write_run(folder, 3, recipe=RECIPE, environment=SPLIT)
        lines = (ledger / "ledger.jsonl").read_bytes().splitlines()
        assert json.loads(lines[0])["kind"] == "header"
        code, err = in_new_process(replay_with_entry, ledger, entry)
        assert code == exit_codes.CANNOT_JUDGE and "Traceback" not in err


def replay_with_entry(ledger, entry):
    from det_lightning.ledger.reader import LedgerReader

    LedgerReader.entry = property(lambda self: entry)
    code, _, err = answer(["replay", str(ledger)])
    return code, err
