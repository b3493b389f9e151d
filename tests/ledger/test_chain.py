"""`verify_chain` notices every change of a ledger's bytes and names the first bad line."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.errors import LedgerError
from det_lightning.ledger.chain import ChainReport, verify_chain
from det_lightning.ledger.lines import encode_line
from det_lightning.ledger.store import LedgerWriter
from tests.ledger.example_runs import append_steps, write_run

FILES = ("ledger.jsonl", "leaves-weights.bin", "leaves-gradients.bin")


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory) -> dict[str, bytes]:
    """The files of a run with a checkpoint, a resume and a closing line."""
    path = tmp_path_factory.mktemp("chain") / "run"
    writer = LedgerWriter.create(path, recipe={"seed": 1}, environment={}, entry={})
    append_steps(writer, range(4), names=("a", "b"))
    trace = writer.trace
    writer.checkpoint(3, "3.ckpt", "ab")
    append_steps(writer, [4], names=("a", "b"))
    writer.abandon()
    writer = LedgerWriter.reopen(path, step=3, trace=trace, environment={})
    append_steps(writer, [4, 5], names=("a", "b"))
    writer.close()
    return {name: (path / name).read_bytes() for name in FILES}


def verified(files: dict[str, bytes]) -> ChainReport:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        return verify_chain(directory)


def lines_of(files: dict[str, bytes]) -> list[bytes]:
    return files["ledger.jsonl"].splitlines(keepends=True)


def test_an_untouched_ledger_is_sound(resumed_run):
    report = verified(resumed_run)
    assert (report.sound, report.torn, report.closed) == (True, False, True)
    assert (report.first_step, report.last_step, report.records, report.superseded) == (0, 5, 6, 1)
    assert report.lines == len(lines_of(resumed_run))


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 1 << 30), flipped=st.integers(1, 255))
def test_any_changed_byte_of_the_lines_is_noticed(resumed_run, place, flipped):
    content = bytearray(resumed_run["ledger.jsonl"])
    place %= len(content)
    line = content[:place].count(b"\n") + 1
    content[place] ^= flipped
    report = verified(resumed_run | {"ledger.jsonl": bytes(content)})
    if place == len(content) - 1:  # the last line end: what a killed process leaves, reported as that
        assert (report.sound, report.closed, report.torn_bytes > 0) == (True, False, True)
    else:
        assert not report.sound
        assert report.damage.line == line


def test_every_changed_byte_of_the_leaves_is_noticed(resumed_run):
    for name in FILES[1:]:
        for place in range(0, len(resumed_run[name]), 3):
            content = bytearray(resumed_run[name])
            content[place] ^= 1 << place % 8
            report = verified(resumed_run | {name: bytes(content)})
            assert not report.sound
            assert f"leaves-{name[7:-4]}.bin do not have the root it records" in report.damage.what


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_lines_that_are_dropped_doubled_or_moved_are_noticed(resumed_run, data):
    lines = lines_of(resumed_run)
    place = data.draw(st.integers(0, len(lines) - 2))
    other = data.draw(st.integers(0, len(lines) - 1).filter(lambda other: other != place))
    change = data.draw(st.sampled_from(["drop", "double", "swap"]))
    changed = list(lines)
    if change == "drop":
        del changed[place]
    elif change == "double":
        changed.insert(other, lines[place])
    else:
        changed[place], changed[other] = changed[other], changed[place]
    report = verified(resumed_run | {"ledger.jsonl": b"".join(changed)})
    assert not report.sound


def test_a_line_sealed_anew_by_a_forger_breaks_its_trace_and_the_chain_after_it(resumed_run):
    lines = lines_of(resumed_run)
    for place, line in enumerate(lines):
        body = json.loads(line)
        if body["kind"] != "record":
            continue
        forged = body | {"agree": body["agree"] | {"epoch": 99}}
        fields = {name: value for name, value in forged.items() if name not in ("kind", "chain", "seal")}
        changed = [*lines[:place], encode_line("record", fields, body["chain"]), *lines[place + 1 :]]
        report = verified(resumed_run | {"ledger.jsonl": b"".join(changed)})
        assert (report.damage.line, report.damage.step) == (place + 1, body["step"])
        assert "its trace does not follow" in report.damage.what

        fields = {name: value for name, value in body.items() if name not in ("kind", "chain", "seal")}
        fields["facts"] = {"time_ns": 1}
        changed = [*lines[:place], encode_line("record", fields, body["chain"]), *lines[place + 1 :]]
        report = verified(resumed_run | {"ledger.jsonl": b"".join(changed)})
        assert report.damage.line == place + 2
        assert "its chain is not the digest of the line before" in report.damage.what


def test_a_ledger_cut_at_a_line_end_is_sound_but_no_longer_closed(resumed_run):
    report = verified(resumed_run | {"ledger.jsonl": b"".join(lines_of(resumed_run)[:-1])})
    assert (report.sound, report.closed, report.records) == (True, False, 6)


def test_a_ledger_cut_within_a_line_tells_what_was_lost(resumed_run):
    report = verified(resumed_run | {"ledger.jsonl": resumed_run["ledger.jsonl"][:-700]})
    assert (report.sound, report.torn_bytes > 0, report.records) == (True, True, 5)
    assert report.torn_leaf_bytes == {"weights": 32, "gradients": 32}


def test_leaves_that_are_missing_or_short_are_noticed_at_the_first_record_that_needs_them(resumed_run):
    short = resumed_run["leaves-weights.bin"][:-1]
    report = verified(resumed_run | {"leaves-weights.bin": short})
    assert (report.damage.step, "the file was cut" in report.damage.what) == (5, True)
    without = {name: content for name, content in resumed_run.items() if name != "leaves-weights.bin"}
    report = verified(without)
    assert (report.damage.step, report.damage.line) == (0, 3)
    assert "does not exist" in report.damage.what


def test_rows_without_a_record_are_told_apart_from_damage(resumed_run):
    report = verified(resumed_run | {"leaves-weights.bin": resumed_run["leaves-weights.bin"] + b"x" * 5})
    assert (report.sound, report.torn_leaf_bytes) == (True, {"weights": 5})


def test_an_empty_file_is_damage_of_its_first_line_and_a_missing_one_an_error(resumed_run, tmp_path):
    report = verified(resumed_run | {"ledger.jsonl": b""})
    assert (report.damage.line, report.damage.what) == (1, "there is no whole line, not even a header")
    with pytest.raises(LedgerError, match="does not exist"):
        verify_chain(tmp_path)


def test_progress_is_told_now_and_then(tmp_path):
    seen = []
    verify_chain(write_run(tmp_path / "run", 600), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) >= 2
    assert all(done <= total for done, total in seen)
    shutil.rmtree(tmp_path / "run")
