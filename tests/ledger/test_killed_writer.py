"""A writer killed at any moment loses at most the record it was writing, and the next start says so."""

import os

import pytest

from det_lightning.errors import LedgerError
from det_lightning.ledger.chain import verify_chain
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.ledger.example_runs import append_steps, trace_at, write_run
from tests.ledger.killed_writer import kill_writers


def test_a_killed_writer_loses_at_most_one_record_and_its_ledger_is_continued(tmp_path):
    path = tmp_path / "run"
    for done, report in kill_writers(path, kills=8, records=3, seed=7):
        assert done[-1] <= report.last_step <= done[-1] + 1
    with LedgerReader(path) as reader:
        step = reader.last_step
        record = reader.record(step)
    writer = LedgerWriter.reopen(path, step=step, trace=record.trace, environment={})
    append_steps(writer, [step + 1])
    writer.close()
    report = verify_chain(path)
    assert (report.sound, report.torn, report.records) == (True, False, step + 2)
    whole = write_run(tmp_path / "whole", step + 1)
    assert trace_at(whole, step + 1) == trace_at(path, step + 1)


def test_a_death_after_any_byte_leaves_a_ledger_that_reads_and_continues(tmp_path):
    """All places of death at once: after each byte of the last record's leaves and line, in the order they
    are written.
    """
    path = write_run(tmp_path / "run", 1, kinds=["weights"], names=("a",), close=False)
    names = ("leaves-weights.bin", "ledger.jsonl")
    before = {name: (path / name).read_bytes() for name in names}
    trace = trace_at(path, 1)
    writer = LedgerWriter.reopen(path, step=1, trace=trace, environment={})
    append_steps(writer, [2], kinds=["weights"], names=("a",))
    writer.abandon()
    after = {name: (path / name).read_bytes() for name in names}
    deaths = [(names[0], size) for size in range(len(before[names[0]]), len(after[names[0]]) + 1)]
    deaths += [(names[1], size) for size in range(len(before[names[1]]), len(after[names[1]]), 31)]
    for name, size in deaths:
        (path / names[0]).write_bytes(after[names[0]][:size] if name == names[0] else after[names[0]])
        (path / names[1]).write_bytes(after[names[1]][:size] if name == names[1] else before[names[1]])
        report = verify_chain(path)
        assert report.sound and report.last_step == 1
        LedgerWriter.reopen(path, step=1, trace=trace, environment={}).close()
        assert verify_chain(path).sound and not verify_chain(path).torn
        with LedgerReader(path) as reader:
            assert (reader.last_step, reader.closed) == (1, True)


@pytest.mark.parametrize("write", range(4))
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_on_either_side_of_a_write_ends_the_writer_but_not_the_ledger(tmp_path, monkeypatch, write, after):
    path = write_run(tmp_path / "run", 3, close=False)
    trace = trace_at(path, 3)
    writer = LedgerWriter.reopen(path, step=3, trace=trace, environment={})
    whole, left = os.write, [write]

    def interrupted(file, data):
        left[0] -= 1
        if left[0] < 0 and not after:
            raise KeyboardInterrupt
        written = whole(file, data)
        if left[0] < 0:
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        append_steps(writer, [4])
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="was closed; reopen it"):
        append_steps(writer, [4])
    writer.close()
    assert verify_chain(path).sound
    writer = LedgerWriter.reopen(path, step=3, trace=trace, environment={})
    append_steps(writer, [4, 5])
    writer.close()
    report = verify_chain(path)
    assert (report.sound, report.torn, report.last_step) == (True, False, 5)


def test_a_start_that_died_before_its_header_is_no_ledger_and_is_started_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ledger.jsonl.new").write_bytes(b'{"chain":"00')
    write_run(tmp_path / "run", 2)
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [
        "leaves-gradients.bin",
        "leaves-weights.bin",
        "ledger.jsonl",
    ]
