"""Resuming in the same ledger: torn ends are cut and counted, steps that appear twice count by their last
record.
"""

import pytest

from det_lightning.errors import LedgerError
from det_lightning.ledger.chain import verify_chain
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.ledger.example_runs import append_steps, trace_at, write_run

CHANGED = ((0, "weights", "layer.2.bias"),)


def reopen(path, step, **options):
    return LedgerWriter.reopen(path, step=step, trace=trace_at(path, step), environment={}, **options)


def test_steps_that_appear_twice_count_by_their_last_record(tmp_path):
    path = write_run(tmp_path / "run", 8, close=False)
    writer = reopen(path, 4)
    append_steps(writer, range(5, 8), changes=CHANGED)
    writer.close()
    with LedgerReader(path) as reader:
        assert (reader.first_step, reader.last_step, reader.count, len(reader.resumes)) == (0, 7, 8, 1)
        assert [record.step for record in reader.records()] == list(range(8))
        assert [reader.record(step) for step in range(8)] == list(reader.records())
        with pytest.raises(LedgerError, match="no record of step 8"):
            reader.record(8)
    report = verify_chain(path)
    assert (report.sound, report.torn, report.records, report.superseded) == (True, False, 8, 4)
    same = write_run(tmp_path / "same", 8)
    assert trace_at(path, 4) == trace_at(same, 4)
    assert trace_at(path, 5) != trace_at(same, 5)


def test_a_run_resumed_without_a_change_ends_with_the_trace_of_the_uninterrupted_run(tmp_path):
    path = write_run(tmp_path / "run", 6, close=False)
    writer = reopen(path, 3)
    append_steps(writer, range(4, 9))
    writer.close()
    assert trace_at(path, 8) == trace_at(write_run(tmp_path / "whole", 8), 8)


@pytest.mark.parametrize(
    "resumes",
    [[(3, 6), (5, 5), (5, 12), (2, 4), (4, 9)], [(0, 0), (0, 3), (0, 10)], [(8, 9), (1, 8), (8, 8), (4, 11)]],
)
def test_any_sequence_of_resumes_reads_as_the_run_that_counts(tmp_path, resumes):
    path = write_run(tmp_path / "run", 10)
    expected = [record.trace for record in LedgerReader(path).records()]
    for place, (step, last) in enumerate(resumes):
        writer = reopen(path, step)
        expected = expected[: step + 1]
        for each in range(step + 1, last + 1):
            append_steps(writer, [each], fields={each: {"clip": f"{place:016x}"}})
            expected.append(writer.trace)
        writer.close()
    with LedgerReader(path) as reader:
        assert [record.trace for record in reader.records()] == expected
        assert [reader.record(step).trace for step in range(len(expected))] == expected
        assert (len(reader.resumes), reader.last_step) == (len(resumes), len(expected) - 1)
    report = verify_chain(path)
    assert (report.sound, report.records, report.superseded > 0) == (True, len(expected), True)


def test_a_seam_without_a_record_after_it_ends_the_run_at_its_step(tmp_path):
    path = write_run(tmp_path / "run", 8)
    reopen(path, 4).abandon()
    with LedgerReader(path) as reader:
        assert (reader.last_step, reader.count, reader.closed) == (4, 5, False)
        assert [record.step for record in reader.records()] == list(range(5))


def test_checkpoints_behind_a_seam_no_longer_count(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    for step in range(6):
        append_steps(writer, [step])
        writer.checkpoint(step, f"{step}.ckpt", "")
    writer.close()
    reopen(tmp_path / "run", 3).abandon()
    with LedgerReader(tmp_path / "run") as reader:
        assert [each.step for each in reader.checkpoints()] == [0, 1, 2, 3]


def test_a_torn_end_is_cut_counted_and_written_into_the_seam(tmp_path):
    path = write_run(tmp_path / "run", 8, close=False)
    whole = verify_chain(path)
    with open(path / "ledger.jsonl", "ab") as file:
        file.write(b'{"agree":{"st')
    with open(path / "leaves-weights.bin", "ab") as file:
        file.write(b"x" * 40)
    report = verify_chain(path)
    assert (report.sound, report.torn_bytes, report.torn_leaf_bytes) == (True, 13, {"weights": 40})
    assert (report.records, report.last_step) == (whole.records, 8)
    with LedgerReader(path) as reader:
        assert (reader.torn_bytes, reader.last_step) == (13, 8)
    writer = reopen(path, 8)
    assert (writer.torn_bytes, writer.torn_leaf_bytes) == (13, 40)
    append_steps(writer, [9])
    writer.close()
    report = verify_chain(path)
    assert (report.sound, report.torn, report.records) == (True, False, 10)
    assert b'"torn_bytes":13' in (path / "ledger.jsonl").read_bytes()


def test_leaves_that_the_last_records_did_not_keep_are_not_taken_for_a_torn_end(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    append_steps(writer, range(3, 6), kinds=["weights"])
    writer.abandon()
    writer = reopen(tmp_path / "run", 5)
    assert writer.torn_leaf_bytes == 0
    append_steps(writer, [6])
    writer.close()
    assert verify_chain(tmp_path / "run").sound


def test_a_state_of_another_run_is_refused(tmp_path):
    path = write_run(tmp_path / "run", 8)
    other = write_run(tmp_path / "other", 8, changes=CHANGED)
    before = (path / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="holds another run: its trace after step 4"):
        LedgerWriter.reopen(path, step=4, trace=trace_at(other, 4), environment={})
    with pytest.raises(LedgerError, match="no record of step 9; it holds the steps 0 to 8"):
        LedgerWriter.reopen(path, step=9, trace=trace_at(other, 8), environment={})
    assert (path / "ledger.jsonl").read_bytes() == before


def test_leaves_cut_behind_the_ledgers_back_are_refused_at_the_next_start(tmp_path):
    path = write_run(tmp_path / "run", 8)
    leaves = (path / "leaves-weights.bin").read_bytes()
    (path / "leaves-weights.bin").write_bytes(leaves[:-16])
    with pytest.raises(LedgerError, match="the file was cut"):
        reopen(path, 8)
