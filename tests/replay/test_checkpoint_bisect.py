"""bisect without ledgers: two directories of checkpoints, of det or of stock Lightning, or a ledger on one side."""

import json
import os
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from det_lightning.cli import exit_codes
from det_lightning.errors import LedgerError
from det_lightning.replay.checkpoint_state import load_checkpoint
from tests.claims.processes import in_new_process
from tests.cli.golden_cases import answer
from tests.replay.planted import PLANTED_STEP, record_with_checkpoints


def bisect(*arguments) -> tuple[int, dict]:
    code, out, err = answer(["bisect", *map(str, arguments), "--json"])
    assert out, err
    return code, json.loads(out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(strategy, plant) -> folder with checkpoints of steps 2, 4, 6, 8 in `saved` and a ledger in `ledger`."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for strategy in ("det", "auto"):
        for plant in ("", "code"):
            made[strategy, plant] = folder / f"{strategy}-{plant or 'plain'}"
            in_new_process(record_with_checkpoints, made[strategy, plant], strategy=strategy, plant=plant)
    return made


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_two_directories_of_checkpoints_are_searched(runs, strategy):
    a, b = runs[strategy, ""] / "saved", runs[strategy, "code"] / "saved"
    code, told = bisect(a, b)
    assert (code, told["steps"], told["last_match"], told["first"]["step"]) == (1, [2, 4, 6, 8], 4, 6)
    assert {name for name, _, _ in told["first"]["tensors"]} >= {"first.weight", "last.bias"}
    assert bisect(a, a)[0] == exit_codes.MATCH


@pytest.mark.parametrize("sides", [("ledger", "saved"), ("saved", "ledger")])
def test_a_ledger_and_checkpoints_are_compared_at_the_steps_of_the_checkpoints(runs, sides):
    a, b = runs["det", ""] / sides[0], runs["det", "code"] / sides[1]
    code, told = bisect(a, b)
    assert (code, told["last_match"], told["first"]["step"]) == (1, 4, 6)
    assert bisect(a, runs["det", ""] / sides[1])[0] == exit_codes.MATCH


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_with_a_replay_the_step_and_the_operation_between_them_are_found(runs, strategy):
    code, told = in_new_process(bisect_with_replay, runs[strategy, ""] / "saved", runs[strategy, "code"] / "saved")
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, PLANTED_STEP, "found")
    assert told["inside"]["difference"]["candidate"]["name"] == "aten.mul.Tensor"
    assert told["inside"]["difference"]["kind"] == "argument"


def test_a_replay_that_cannot_be_made_leaves_the_states_in_the_answer(runs):
    code, told = bisect(runs["auto", ""] / "saved", runs["auto", "code"] / "saved", "--replay")
    assert (code, told["exit_code"], told["first"]["step"]) == (125, 125, 6)
    assert told["inside"]["verdict"] == "cannot be judged" and "Give --entry" in told["inside"]["reason"]


@pytest.mark.parametrize("strategy", ["det", "auto"])
def test_a_ledger_beside_checkpoints_is_replayed_too_though_stock_lightning_notes_no_checkpoint(runs, strategy):
    code, told = in_new_process(bisect_with_replay, runs[strategy, ""] / "ledger", runs[strategy, "code"] / "saved")
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, PLANTED_STEP, "found")


def bisect_with_replay(a, b):
    return bisect(
        a, b, "--replay", "--entry", "tests.replay.planted:build_plain", "--entry", "tests.replay.planted:build_code"
    )


def test_a_replay_that_misses_the_kept_state_is_not_believed(runs):
    code, err = in_new_process(bisect_with_wrong_entry, runs["det", ""] / "saved", runs["det", "code"] / "saved")
    assert code == exit_codes.CANNOT_JUDGE
    assert "does not reach the state that" in err


def bisect_with_wrong_entry(a, b):
    code, out, err = answer(["bisect", str(a), str(b), "--replay", "--entry", "tests.replay.planted:build_plain"])
    hint = "with --replay the step between them is found"
    assert hint in answer(["bisect", str(a), str(b)])[1] and hint not in out
    return code, err


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ("momentum", exit_codes.CANNOT_JUDGE, "of the optimizer differ"),
        ("schedule", exit_codes.DIVERGE, "only settings differ"),
    ],
)
def test_a_kept_state_that_differs_in_optimizer_or_schedule_alone_never_ends_as_a_match(
    runs, tmp_path, change, code, told
):
    for step in (2, 4, 6):
        content = load_checkpoint(runs["det", ""] / "saved" / f"step={step}.ckpt")
        if step == 6 and change == "momentum":
            content["optimizer_states"][0]["state"][0]["momentum_buffer"][0, 0] += 1
        elif step == 6:
            content["lr_schedulers"][0]["gamma"] = 0.75
        torch.save(content, tmp_path / f"step={step}.ckpt")
    answered = in_new_process(bisect_one_code, runs["det", ""] / "saved", tmp_path)
    assert answered[0] == code and told in answered[1] + answered[2], answered


def bisect_one_code(a, b):
    return answer(["bisect", str(a), str(b), "--replay", "--entry", "tests.replay.planted:build_plain"])


class _Bomb:
    def __reduce__(self):
        return (print, ("code of a checkpoint was run",))


def hostile(folder: Path, kind: str) -> Path:
    path = folder / "state.ckpt"
    sound = {"global_step": 1, "state_dict": {"w": torch.ones(2)}}
    contents = {
        "code": sound | {"hyper_parameters": _Bomb()},
        "list": [1, 2],
        "no step": {"state_dict": {}},
        "step of text": sound | {"global_step": "3"},
        "step below zero": sound | {"global_step": -3},
        "state of a list": sound | {"state_dict": [1]},
        "optimizer of text": sound | {"optimizer_states": "x"},
        "optimizer without groups": sound | {"optimizer_states": [{"state": {}}]},
    }
    if kind in contents:
        torch.save(contents[kind], path)
    elif kind == "cut":
        torch.save(sound, path)
        path.write_bytes(path.read_bytes()[:300])
    elif kind == "junk":
        path.write_bytes(b"\x00\xff" * 500)
    elif kind == "empty":
        path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "code", "list", "no step", "step of text", "step below zero", "state of a list", "optimizer of text",
        "optimizer without groups", "cut", "junk", "empty",
    ],
)  # fmt: skip
def test_a_hostile_checkpoint_is_refused_in_one_line_and_none_of_its_code_is_run(runs, tmp_path, capsys, kind):
    path = hostile(tmp_path, kind)
    code, out, err = answer(["bisect", str(path), str(path)])
    assert code == exit_codes.CANNOT_JUDGE
    assert err.startswith("error: ") and "state.ckpt" in err and "Traceback" not in err
    assert "was run" not in out + err + capsys.readouterr().out


def compressed(path: Path) -> None:
    """The checkpoint at `path` with a tensor of a gigabyte of zeros, in a megabyte."""
    with zipfile.ZipFile(path) as sound:
        parts = {each.filename: sound.read(each) for each in sound.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, part in parts.items():
            with archive.open(name, "w") as file:
                for block in [part] if not name.endswith("data/0") else [bytes(1 << 24)] * 64:
                    file.write(block)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "is cut, damaged or none at all (RuntimeError"),
        ("junk", "is cut, damaged or none at all (Unsupported operand"),
        ("empty", "is cut, damaged or none at all (EOFError"),
        ("code", "without running code from it (GLOBAL print was not"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_says_whether_it_is_damaged_or_holds_code(tmp_path, kind, message):
    with pytest.raises(LedgerError) as raised:
        load_checkpoint(hostile(tmp_path, kind))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(1).expand(1 << 40), "a tensor of 4398046511104 bytes of which 4 are stored"),
        (torch.ones(2).to_sparse(), "only strided tensors"),
        (torch.ones(2, device="meta"), "on device meta"),
    ],
)
def test_a_tensor_that_cannot_be_digested_is_refused_in_one_line(tmp_path, tensor, message):
    path = tmp_path / "state.ckpt"
    torch.save({"global_step": 1, "state_dict": {"w": tensor}}, path)
    code, out, err = answer(["bisect", str(path), str(path)])
    assert (code, out) == (exit_codes.CANNOT_JUDGE, "")
    assert message in err and err.count("\n") == 2


def test_a_tensor_that_is_quantized_is_refused_without_a_crash_or_a_warning(tmp_path):
    path = tmp_path / "state.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        torch.save({"global_step": 1, "state_dict": {"w": weight}}, path)
    code, out, err = answer(["bisect", str(path), str(path)])
    assert (code, out) == (exit_codes.CANNOT_JUDGE, "")
    assert "quantized tensor" in err and err.count("\n") == 2


def test_a_checkpoint_that_would_unpack_to_a_gigabyte_is_refused_before_it_does(tmp_path):
    path = tmp_path / "state.ckpt"
    torch.save({"global_step": 1, "state_dict": {"w": torch.ones(2)}}, path)
    compressed(path)
    begin = time.monotonic()
    with pytest.raises(LedgerError, match=r"would unpack to 10737\d* bytes, more than it has"):
        load_checkpoint(path)
    assert time.monotonic() - begin < 2


def test_checkpoints_of_two_runs_in_one_directory_are_refused(runs, tmp_path):
    for name, run in (("one", ""), ("two", "code")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step=6.ckpt").symlink_to(runs["det", run] / "saved" / "step=6.ckpt")
    code, _, err = answer(["bisect", str(tmp_path), str(tmp_path)])
    assert code == exit_codes.CANNOT_JUDGE and "unlike states of one step, 6" in err


def test_a_directory_without_either_and_a_fifo_are_refused(tmp_path):
    (tmp_path / "nothing").mkdir()
    assert answer(["bisect", str(tmp_path / "nothing"), str(tmp_path / "nothing")])[0] == exit_codes.MISUSE
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(LedgerError, match="not a regular file"):
        load_checkpoint(tmp_path / "pipe.ckpt")
