"""What the commands do that run a recorded run again: options handed on, answers, errors of user code."""

import json
import sys
import types

import numpy
import pytest
from blake3 import blake3

from det_lightning.bisection.flipped_bit import array_digest
from det_lightning.cli import exit_codes
from det_lightning.cli.side_options import SideOptions
from det_lightning.errors import InputError
from det_lightning.ledger.compare import difference_at
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import agree_and_leaves, append_steps


def result(matched=True, first=None, steps=12):
    return types.SimpleNamespace(matched=matched, first=first, steps=steps)


def finding(verdict, reason=""):
    return types.SimpleNamespace(
        verdict=verdict, reason=reason, rank=None, difference=None, element=None, tensor="", sample=None, before=()
    )


@pytest.fixture
def fake_replay(monkeypatch):
    """A replay package that records its calls and answers what it is told to."""
    module = types.ModuleType("det_lightning.replay")
    module.calls, module.result, module.tensors = [], result(), {}

    def answer_of(kind):
        value = getattr(module, kind)
        if isinstance(value, BaseException):
            raise value
        return value

    def replay(path, **options):
        module.calls.append((path, options))
        return answer_of("result")

    def tensors_at(path, step, **options):
        module.calls.append((str(path), step, options))
        return answer_of("tensors")

    def search(sides, reference, candidate, step):
        module.calls.append((reference.path.name, candidate.path.name, step, sides))
        return answer_of("finding")

    module.replay, module.tensors_at = replay, tensors_at
    module.finding = finding("transient", "run again, it is the reference's")
    monkeypatch.setattr(SideOptions, "search", search)
    monkeypatch.setitem(sys.modules, "det_lightning.replay", module)
    return module


def test_verify_replays_the_whole_run_after_checking_the_chain(beside_ledgers, fake_replay):
    code, out, err = answer(["verify", "a", "--world", "3", "--accumulate", "2", "--entry", "m:f"])
    assert (code, err) == (exit_codes.MATCH, "")
    assert out.splitlines()[0].startswith("sound: a")
    assert out.splitlines()[1] == "match: steps 0 to 12 agree, replayed with world size 3 (12 steps run)"
    options = {"start": None, "stop": None, "world": 3, "accumulate": 2, "entry": "m:f"}
    assert fake_replay.calls == [("a", options | {"out": None, "progress": None})]


def test_verify_of_some_steps_runs_no_step_twice(beside_ledgers, fake_replay):
    fake_replay.result = result(steps=9)
    code, out, _ = answer(["verify", "a", "--steps", "3"])
    assert [(call[1]["start"], call[1]["stop"]) for call in fake_replay.calls] == [(3, 12)]
    assert (code, out.splitlines()[1]) == (0, "match: steps 4, 8, 12 agree, replayed with world size 1 (9 steps run)")


def test_samples_of_steps_start_from_the_checkpoint_before_each(tmp_path, fake_replay):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    for step in range(31):
        append_steps(writer, [step])
        if step in (10, 20, 25):
            path = tmp_path / f"{step}.ckpt"
            path.write_bytes(b"state")
            # a file that is no longer what was recorded is not started from
            writer.checkpoint(step, str(path), "00" * 32 if step == 25 else blake3(b"state").hexdigest())
    writer.close()
    answer(["verify", str(tmp_path / "run"), "--steps", "6"])
    assert [(call[1]["start"], call[1]["stop"]) for call in fake_replay.calls] == [(4, 10), (14, 20), (24, 30)]


def test_verify_does_not_replay_a_damaged_ledger(beside_ledgers, fake_replay):
    assert answer(["verify", "damaged"])[0] == exit_codes.DIVERGE
    assert fake_replay.calls == []


def test_a_replay_that_diverges_is_told_like_a_bisect(beside_ledgers, fake_replay):
    with LedgerReader("a") as a, LedgerReader("middle") as middle:
        fake_replay.result = result(False, difference_at(a, middle, 5, last_match=4), 5)
    for arguments in (["verify", "a"], ["replay", "a", "--to", "7"]):
        code, out, _ = answer(arguments)
        assert code == exit_codes.DIVERGE
        assert "diverge: the replay of a diverges at step 5" in out
        assert "layer.2.bias" in out
    code, out, _ = answer(["verify", "a", "--json"])
    told = json.loads(out)
    assert (code, told["exit_code"], told["replay"]["first"]["step"]) == (1, 1, 5)


def test_replay_hands_its_options_on(beside_ledgers, fake_replay):
    code, out, _ = answer(
        [
            "replay",
            "a",
            "--from",
            "2",
            "--to",
            "7",
            "--world",
            "2",
            "--accumulate",
            "3",
            "--entry",
            "m:f",
            "--out",
            "there",
        ]
    )
    options = {"start": 2, "stop": 7, "world": 2, "accumulate": 3, "entry": "m:f", "out": "there"}
    assert fake_replay.calls == [("a", options | {"progress": None})]
    assert (code, out) == (0, "match: steps 2 to 7 agree, replayed with world size 2 (12 steps run)\n")
    assert answer(["replay", "a", "--from", "7", "--to", "7"])[0] == exit_codes.MISUSE
    assert answer(["replay", "a", "--from", "13"])[0] == exit_codes.MISUSE
    assert answer(["replay", "empty"])[0] == exit_codes.MATCH, "the fake replay says that steps were run"
    fake_replay.result = result(steps=0)
    assert answer(["replay", "a"])[0] == exit_codes.CANNOT_JUDGE


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("no\nmodel"), "error: RuntimeError: no model\n"),
        (InputError("the entry is wrong"), "error: the entry is wrong\n"),
        (SystemExit(0), "error: SystemExit: 0\n"),
        (SystemExit(129), "error: SystemExit: 129\n"),
        (ImportError("no module named lightning"), "error: ImportError: no module named lightning\n"),
    ],
)
def test_any_exception_of_user_code_means_cannot_be_judged_in_one_line(beside_ledgers, fake_replay, error, shown):
    fake_replay.result = error
    code, _, err = answer(["replay", "a"])
    assert code == exit_codes.CANNOT_JUDGE
    assert shown in err and "Traceback" not in err


def test_a_replay_that_fails_takes_nothing_of_the_answer_with_it(beside_ledgers, fake_replay, tmp_path):
    fake_replay.finding = RuntimeError("the data set is gone")
    bisect = ["bisect", "a", "middle", "--replay", "--html", str(tmp_path / "report.html")]
    code, out, err = answer([*bisect, "--json"])
    told = json.loads(out)
    assert (code, told["exit_code"], told["first"]["step"]) == (125, 125, 5)
    assert told["inside"]["verdict"] == "cannot be judged" and "data set is gone" in told["inside"]["reason"]
    assert "error: RuntimeError: the data set is gone" in err
    assert "the data set is gone" in (tmp_path / "report.html").read_text()
    code, out, err = answer(bisect)
    assert code == 125 and "diverge: the runs diverge at step 5" in out and "the data set is gone" in err


@pytest.mark.parametrize("arguments", [["verify", "a"], ["bisect", "a", "junk"], ["show", "junk"]])
def test_an_error_is_json_too_where_that_was_asked_for(beside_ledgers, fake_replay, arguments):
    fake_replay.result = RuntimeError("the data set is gone")
    code, out, err = answer([*arguments, "--json"])
    told = json.loads(out)
    assert (code, told["exit_code"], told["verdict"]) == (125, 125, "cannot be judged")
    assert told["reason"] in err
    assert "exit_code" not in answer(arguments)[1]


def test_debug_shows_the_traceback(beside_ledgers, fake_replay):
    fake_replay.result = RuntimeError("no model")
    code, _, err = answer(["--debug", "replay", "a"])
    assert code == exit_codes.CANNOT_JUDGE
    assert "Traceback" in err and "RuntimeError: no model" in err


def test_an_interrupt_stops_gits_bisect_too(beside_ledgers, fake_replay):
    fake_replay.result = KeyboardInterrupt()
    code, _, err = answer(["replay", "a"])
    assert (code, err) == (exit_codes.INTERRUPTED, "")
    assert code >= 128


def test_demo_hands_its_options_on_and_returns_the_exit_code_of_the_demo(monkeypatch):
    calls = []
    module = types.ModuleType("det_lightning.demo")
    module.main = lambda **options: calls.append(options) or 1
    monkeypatch.setitem(sys.modules, "det_lightning.demo", module)
    assert answer(["demo", "--world", "3", "--order", "shuffled", "--impostor", "float64", "--flip", "secret"])[0] == 1
    assert answer(["demo"])[0] == 1
    nothing = dict.fromkeys(["world", "micro", "threads", "impostor", "flip", "export", "picture"])
    assert calls == [
        nothing | {"world": 3, "order": "shuffled", "impostor": "float64", "flip": "secret"},
        nothing | {"order": "natural"},
    ]
    assert answer(["demo", "--order", "random"])[0] == exit_codes.MISUSE
    assert answer(["demo", "--world", "0"])[0] == exit_codes.MISUSE


class FlippedRun:
    """Two ledgers whose weights differ at step 2 by one flipped bit of w[1, 2]."""

    def __init__(self, directory, *, bits=(1 << 21,)):
        self.clean = numpy.arange(12, dtype=numpy.float32).reshape(3, 4) / 8
        flipped = self.clean.copy()
        for bit in bits:
            flipped.view(numpy.uint32)[1, 2] ^= numpy.uint32(bit)
        self.a, self.b = directory / "flip_a", directory / "flip_b"
        for path, array in ((self.a, self.clean), (self.b, flipped)):
            self._write(path, array)

    def _write(self, path, array):
        writer = LedgerWriter.create(path, recipe={}, environment={}, entry={})
        for step in range(3):
            agree, leaves = agree_and_leaves(step, kinds=["gradients"])
            weights = array if step == 2 else self.clean
            writer.append(agree, leaves | {"weights": {"w": array_digest(weights, "float32")}}, {})
        writer.close()


def test_bisect_with_replay_names_the_flipped_bit(tmp_path, fake_replay):
    run = FlippedRun(tmp_path)
    fake_replay.tensors = {"w": run.clean}
    code, out, _ = answer(["bisect", str(run.a), str(run.b), "--replay", "--entry", "m:f"])
    assert code == exit_codes.DIVERGE
    (search, tensors) = fake_replay.calls
    assert search[:3] == ("flip_a", "flip_b", 2) and search[3].entry == ("m:f", "m:f")
    assert tensors == (str(run.a), 2, {"kind": "weights", "entry": "m:f"})
    assert out.splitlines()[-4] == "replay: transient: run again, it is the reference's"
    assert out.splitlines()[-3:] == [
        "replay: one flipped bit explains it: w[1, 2], bit 21",
        "  reference  0x3f400000  0.75   float32",
        "  candidate  0x3f600000  0.875  2097152 ulps apart",
    ]
    code, out, _ = answer(["bisect", str(run.a), str(run.b), "--replay", "--json"])
    flip = json.loads(out)["flip"]["flip"]
    assert (flip["index"], flip["bit"], flip["ulps"]) == ([1, 2], 21, 1 << 21)


def test_bisect_with_replay_claims_no_flip_where_two_bits_changed(tmp_path, fake_replay):
    run = FlippedRun(tmp_path, bits=(1, 1 << 21))
    fake_replay.tensors = {"w": run.clean}
    code, out, _ = answer(["bisect", str(run.a), str(run.b), "--replay"])
    assert code == exit_codes.DIVERGE
    assert out.splitlines()[-1] == "replay: no single flipped bit explains the two digests of w"


def test_a_replay_that_does_not_reproduce_the_reference_is_not_believed(tmp_path, fake_replay):
    run = FlippedRun(tmp_path)
    fake_replay.tensors = {"w": run.clean + 1}
    code, out, err = answer(["bisect", str(run.a), str(run.b), "--replay"])
    assert code == exit_codes.CANNOT_JUDGE
    assert "diverge: the runs diverge at step 2" in out
    assert "the replay did not reproduce it" in err


def test_bisect_looks_for_no_flip_where_several_weights_or_none_differ(beside_ledgers, fake_replay):
    assert "replay: 2 weights differ" in answer(["bisect", "a", "two", "--replay"])[1]
    assert "replay: no single weight is known to differ" in answer(["bisect", "a", "loss", "--replay"])[1]
    assert "replay" not in answer(["bisect", "a", "a", "--replay"])[1]
    assert "before their first step" in answer(["bisect", "a", "first", "--replay"])[1]
    assert [call[:3] for call in fake_replay.calls] == [("a", "two", 5), ("a", "loss", 7)]


def test_a_replay_that_shows_nothing_means_cannot_be_judged(beside_ledgers, fake_replay):
    fake_replay.finding = finding("cannot be judged", "two replays differ from each other")
    code, out, _ = answer(["bisect", "a", "two", "--replay"])
    assert code == exit_codes.CANNOT_JUDGE
    assert out.splitlines()[-1] == "replay: cannot be judged: two replays differ from each other"


def test_each_side_has_its_own_entry_interpreter_and_directory(beside_ledgers, fake_replay, tmp_path):
    answer(
        ["bisect", "a", "two", "--replay", "--entry", "m:f", "--entry", "m:g", "--python", "p", "--cwd", str(tmp_path)]
    )
    sides = fake_replay.calls[0][3]
    assert sides == SideOptions(("m:f", "m:g"), ("p", "p"), (str(tmp_path), str(tmp_path)), None, None)
    for wrong in (["--cwd", str(tmp_path / "nowhere")], ["--entry", "a:b", "--entry", "a:c", "--entry", "a:d"]):
        assert answer(["bisect", "a", "two", "--replay", *wrong])[0] == exit_codes.MISUSE


def test_without_leaves_a_transient_fault_is_told_without_a_bit(beside_ledgers, fake_replay):
    code, out, _ = answer(["bisect", "kept", "kept_changed", "--replay"])
    assert code == exit_codes.DIVERGE
    assert "leaves of step 5 were not kept for weights; roots were" in out
    assert "replay: transient" in out
    assert "the leaves of step 5 were not kept, so a flipped bit of a weight cannot be named" in out
    assert not [call for call in fake_replay.calls if len(call) == 3]  # no replay for nothing
