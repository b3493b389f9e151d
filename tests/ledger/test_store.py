import errno
import os

import pytest

from det_lightning.errors import LedgerError
from det_lightning.ledger import append_file
from det_lightning.ledger.record import next_trace, root
from det_lightning.ledger.store import Checkpoint, LedgerReader, LedgerWriter
from tests.ledger.example_runs import (
    ENTRY,
    ENVIRONMENT,
    NAMES,
    RECIPE,
    agree_and_leaves,
    append_steps,
    trace_at,
    write_run,
)


def test_a_ledger_gives_back_what_was_written(tmp_path):
    with LedgerReader(write_run(tmp_path / "run", 8)) as reader:
        assert (reader.recipe, reader.environment, reader.entry) == (RECIPE, ENVIRONMENT, ENTRY)
        assert (reader.first_step, reader.last_step, reader.count, len(reader.resumes)) == (0, 8, 9, 0)
        assert (reader.closed, reader.torn_bytes, reader.resumed_from) == (True, 0, None)
        trace = reader.start_trace
        for step, record in enumerate(reader.records()):
            agree, leaves = agree_and_leaves(step)
            agree["roots"] = {kind: root(digests) for kind, digests in leaves.items()}
            trace = next_trace(trace, agree)
            assert (record.step, record.agree, record.trace) == (step, agree, trace)
            assert record.facts == {"time_ns": 1000 + step}
            for kind, digests in leaves.items():
                assert reader.leaves(record, kind) == {name: d.hex() for name, d in digests.items()}
            assert reader.record(step) == record


def test_a_kind_that_a_record_does_not_keep_has_no_leaves(tmp_path):
    with LedgerReader(write_run(tmp_path / "run", 2)) as reader:
        assert reader.leaves(reader.record(0), "gradients") == {}
        assert reader.leaves(reader.record(1), "buffers") == {}


def test_names_that_change_during_the_run_are_kept_for_each_record(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, [0], kinds=["weights"])
    append_steps(writer, [1, 2], kinds=["weights"], names=("other",))
    append_steps(writer, [3], kinds=["weights"])
    writer.close()
    with LedgerReader(tmp_path / "run") as reader:
        names = [tuple(reader.leaves(record, "weights")) for record in reader.records()]
    assert names == [NAMES, ("other",), ("other",), NAMES]


def test_checkpoints_are_read_back_in_order(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    writer.checkpoint(2, "step=2.ckpt", "ab")
    append_steps(writer, [3])
    writer.checkpoint(3, "step=3.ckpt", "")
    writer.close()
    with LedgerReader(tmp_path / "run") as reader:
        assert reader.checkpoints() == (Checkpoint(2, "step=2.ckpt", "ab"), Checkpoint(3, "step=3.ckpt", ""))


def test_a_checkpoint_of_a_step_without_a_record_is_refused(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    with pytest.raises(LedgerError, match="no record of step 1 yet"):
        writer.checkpoint(1, "x", "")


def test_a_second_ledger_in_one_directory_is_refused_with_a_way_out(tmp_path):
    write_run(tmp_path / "run", 2)
    before = (tmp_path / "run/ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="already holds a ledger; choose another directory"):
        write_run(tmp_path / "run", 2)
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == before


def test_leaves_without_a_ledger_are_not_written_over(tmp_path):
    (tmp_path / "leaves-weights.bin").write_bytes(b"mine")
    with pytest.raises(LedgerError, match="choose an empty directory"):
        write_run(tmp_path, 2)
    assert (tmp_path / "leaves-weights.bin").read_bytes() == b"mine"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(LedgerError, match="is a file; a ledger needs a directory"):
        write_run(tmp_path / "run", 2)


@pytest.mark.parametrize("step", [0, 2, 4, -1, None, "3", 3.0, True])
def test_a_step_out_of_order_is_refused_and_nothing_is_written(tmp_path, step):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "run").iterdir())]
    with pytest.raises(LedgerError, match=r"the next record of .* is for step 3"):
        writer.append({"step": step}, {}, {})
    assert [path.stat().st_size for path in sorted((tmp_path / "run").iterdir())] == sizes


@pytest.mark.parametrize(
    ("agree", "leaves", "facts", "message"),
    [
        ({"loss": 0.5}, {}, {}, "is the float 0.5"),
        ({}, {}, {"time": 0.5}, "is the float 0.5"),
        ({}, {"weights": {"a": b"short"}}, {}, "a tensor digest is 16 bytes"),
        ({}, {"weights": {"a": "x" * 16}}, {}, "a tensor digest is 16 bytes"),
        ({}, {"weights": {"\ud800": b"x" * 16}}, {}, "Unicode"),
        ({}, {"../weights": {"a": b"x" * 16}}, {}, "unknown kind of state '../weights'"),
        ({}, {"weights": {"a": b"x" * 16}, "momentum": {"a": b"x" * 16}}, {}, "known kinds: weights"),
        ({"roots": {"weights": "zz"}}, {}, {}, "hex of 32 bytes"),
        ({"roots": [1]}, {}, {}, "roots"),
    ],
)
def test_an_append_that_is_refused_leaves_the_ledger_as_it_was(tmp_path, agree, leaves, facts, message):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3), kinds=["weights"])
    with pytest.raises(LedgerError) as caught:
        writer.append({"step": 3, **agree}, leaves, facts)
    assert message in str(caught.value)
    append_steps(writer, [3], kinds=["weights"])
    writer.close()
    with LedgerReader(tmp_path / "run") as reader:
        report = reader.verify_chain()
        assert (report.sound, report.torn, report.records) == (True, False, 4)


def test_a_disk_that_takes_only_part_of_a_line_leaves_no_part_of_it(tmp_path, monkeypatch):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    whole = os.write
    monkeypatch.setattr(os, "write", lambda file, data: whole(file, data[: min(len(data), 100)]))
    with pytest.raises(LedgerError, match="is the disk full"):
        append_steps(writer, [3])
    monkeypatch.undo()
    append_steps(writer, [3])
    writer.close()
    with LedgerReader(tmp_path / "run") as reader:
        assert (reader.verify_chain().sound, reader.verify_chain().torn, reader.count) == (True, False, 4)


def test_a_second_writer_of_the_same_ledger_is_refused_until_the_first_has_ended(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    before = (tmp_path / "run/ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="is being written by another process"):
        LedgerWriter.reopen(tmp_path / "run", step=2, trace=writer.trace, environment={})
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == before
    append_steps(writer, [3])
    writer.abandon()
    LedgerWriter.reopen(tmp_path / "run", step=3, trace=writer.trace, environment={}).close()


def test_where_there_are_no_locks_a_second_writer_is_noticed_by_what_it_wrote(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(append_file.fcntl, "flock", no_locks)
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, range(3))
    other = LedgerWriter.reopen(tmp_path / "run", step=2, trace=writer.trace, environment={})
    append_steps(other, [3])
    with pytest.raises(LedgerError, match="another process writes the same ledger"):
        append_steps(writer, [3])
    other.close()
    with LedgerReader(tmp_path / "run") as reader:  # and what it wrote was not harmed
        assert (reader.verify_chain().sound, reader.count) == (True, 4)


def test_nothing_can_be_written_after_the_end(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    append_steps(writer, [0])
    writer.close()
    writer.close()
    writer.abandon()
    with pytest.raises(LedgerError, match="was closed; reopen it"):
        append_steps(writer, [1], kinds=[])


def test_a_run_resumed_in_a_new_ledger_continues_the_trace_of_the_old_one(tmp_path):
    whole = write_run(tmp_path / "whole", 8)
    state = {"step": 5, "trace": trace_at(whole, 5)}
    rest = write_run(tmp_path / "rest", 8, first=6, resumed_from=state)
    assert trace_at(rest, 8) == trace_at(whole, 8)
    with LedgerReader(rest) as reader:
        assert (reader.first_step, reader.count, reader.resumed_from) == (6, 3, state)
    with pytest.raises(LedgerError, match="is for step 6, not 5"):
        write_run(tmp_path / "wrong", 8, first=5, resumed_from=state)
    with pytest.raises(LedgerError, match="resumed_from must name"):
        write_run(tmp_path / "wrong2", 8, resumed_from={"step": 5})


def test_a_missing_step_is_refused_with_the_steps_there_are(tmp_path):
    with LedgerReader(write_run(tmp_path / "run", 8)) as reader:
        for step in (9, -1, 10**30):
            with pytest.raises(LedgerError, match="it holds the steps 0 to 8"):
                reader.record(step)


def test_a_ledger_without_records_says_so(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={})
    writer.close()
    with LedgerReader(tmp_path / "run") as reader:
        assert (reader.first_step, reader.last_step, reader.count, list(reader.records())) == (
            None,
            None,
            0,
            [],
        )
        assert reader.verify_chain().sound
        with pytest.raises(LedgerError, match="it holds no record"):
            reader.record(0)


def test_finding_a_record_reads_a_small_part_of_a_long_file(tmp_path, monkeypatch):
    write_run(tmp_path / "run", 2000)
    size = (tmp_path / "run/ledger.jsonl").stat().st_size
    import os

    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, n, at: read.append(n) or pread(file, n, at))
    with LedgerReader(tmp_path / "run") as reader:
        assert reader.record(1234).step == 1234
    assert sum(read) < size / 4
