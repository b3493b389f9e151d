"""Golden runs: recorded once, checked without a difference, and failing with a message that says what changed."""

import json

import pytest

from det_lightning.cli import exit_codes
from det_lightning.errors import LedgerError
from det_lightning.replay.golden import check_golden, read_golden
from tests.claims.processes import Failed, in_new_process
from tests.cli.golden_cases import answer

ENTRY = "tests.replay.recorded:build"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    code, out, err = in_new_process(answer, ["golden", "record", str(path), "--entry", ENTRY, "--steps", "4"])
    assert (code, err) == (0, "") and out.startswith("recorded: ")
    return path


def changed(golden, tmp_path, **entry):
    """The golden file as if recorded from another entry."""
    content = json.loads(golden.read_text())
    content["entry"] |= entry
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(content))
    return path


def test_a_golden_file_is_small_text_and_agrees_with_a_second_run(golden):
    assert golden.stat().st_size < 20_000
    code, out, _ = in_new_process(answer, ["golden", "check", str(golden)])
    assert (code, out) == (0, f"match: steps 0 to 4 have the bits of {golden}\n")
    in_new_process(check_golden, golden)


def test_it_can_be_recorded_anew_as_it_says_itself(golden, tmp_path):
    again = changed(golden, tmp_path)
    assert in_new_process(answer, ["golden", "record", str(again)])[0] == 0
    assert read_golden(again) == read_golden(golden)


def test_a_change_fails_a_test_with_step_tensor_cause_and_cure(golden, tmp_path):
    path = changed(golden, tmp_path, arguments={"changed_step": 3})
    with pytest.raises(Failed) as raised:
        in_new_process(check_golden, path)
    assert raised.value.kind == "DivergenceError"
    message = raised.value.message
    assert "step 3 differs in clip" not in message and "step 3 differs in loss, gradients" in message
    assert "steps 0 to 2 agree" in message and "the forward pass differs" in message
    assert "gradients first.bias" in message or "weights first.bias" in message
    assert f"det-lightning golden record {path}" in message


def test_a_changed_recipe_is_told_beside_the_step(golden, tmp_path):
    path = changed(golden, tmp_path, arguments={"rate": 0.5})
    code, out, _ = in_new_process(answer, ["golden", "check", str(path), "--json"])
    told = json.loads(out)
    assert (code, told["first"]["step"]) == (exit_codes.DIVERGE, 1)
    assert "optimizers.0.groups.0.lr" in [each["name"] for each in told["headers"]]
    text = in_new_process(answer, ["golden", "check", str(path)])[1]
    assert "recipe optimizers.0.groups.0.lr: 0.25 (3fd0000000000000) -> 0.5 (3fe0000000000000)" in text


def test_stock_lightning_has_golden_runs_too(tmp_path):
    path = tmp_path / "golden.json"
    arguments = ["golden", "record", str(path), "--entry", ENTRY, "--steps", "3", "--strategy", "auto"]
    arguments += ["--precision", "bf16-mixed"]
    assert in_new_process(answer, arguments)[0] == 0
    in_new_process(check_golden, path)
    with pytest.raises(Failed, match="step 1 differs"):
        in_new_process(check_golden, changed(path, tmp_path, arguments={"rate": 0.5}))


def test_an_entry_that_raises_cannot_be_judged(golden, tmp_path):
    path = changed(golden, tmp_path, function="tests.replay.recorded:build_that_raises", arguments={})
    code, _, err = in_new_process(answer, ["golden", "check", str(path)])
    assert code == exit_codes.CANNOT_JUDGE and "the data set is gone" in err


@pytest.mark.parametrize(
    "harm",
    [
        lambda text, content: text[: len(text) // 2],
        lambda text, content: "[]",
        lambda text, content: "[" * 100_000,
        lambda text, content: "\x00",
        lambda text, content: json.dumps(content | {"format": 2}),
        lambda text, content: json.dumps(content | {"steps": 5}),
        lambda text, content: json.dumps(content | {"steps": [1, 2, 3, 4, 5]}),
        lambda text, content: json.dumps(content | {"run": content["run"] | {"steps": 10**12}}),
        lambda text, content: json.dumps(content | {"entry": {"function": 5, "arguments": {}}}),
        lambda text, content: json.dumps(content | {"names": {"weights": ["a"]}}),
        lambda text, content: json.dumps(content | {"names": content["names"] | {"buffers": 5}}),
        lambda text, content: json.dumps(content | {"names": content["names"] | {"buffers": [5]}}),
    ],
)
def test_a_file_that_is_no_golden_file_is_refused_before_anything_runs(golden, tmp_path, harm):
    path = tmp_path / "golden.json"
    text = golden.read_text()
    path.write_text(harm(text, json.loads(text)))
    with pytest.raises(LedgerError, match=r"golden\.json"):
        check_golden(path)


def test_misuse_of_the_options_is_misuse(tmp_path):
    assert answer(["golden", "check", str(tmp_path / "nothing")])[0] == exit_codes.MISUSE
    assert (
        answer(["golden", "record", str(tmp_path / "g.json"), "--entry", "a:b", "--arguments", "[1]"])[0]
        == exit_codes.MISUSE
    )
    assert (
        answer(["golden", "record", str(tmp_path / "g.json"), "--entry", "a:b", "--steps", "0"])[0] == exit_codes.MISUSE
    )
