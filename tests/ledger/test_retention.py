"""What a ledger keeps of its leaves: the last records, chosen steps for good, and roots of all."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger import leaf_file
from det_lightning.ledger.chain import verify_chain
from det_lightning.ledger.compare import difference_at
from det_lightning.ledger.leaf_file import leaf_files, leaf_path
from det_lightning.ledger.retention import LeafParts, Retention
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.ledger.example_runs import agree_and_leaves, append_steps, trace_at, write_run
from tests.ledger.killed_writer import kill_writers, start_writer


def kept_run(path, steps, retention, **options):
    writer = LedgerWriter.create(path, recipe={}, environment={}, entry={}, retention=retention)
    append_steps(writer, range(steps + 1), **options)
    return writer


def kept_steps(path, kind="weights"):
    with LedgerReader(path) as reader:
        return [record.step for record in reader.records() if reader.keeps_leaves(record, kind)]


def leaf_bytes_in(path):
    return sum(leaf_path(path, *each).stat().st_size for each in leaf_files(path))


def test_the_last_leaves_and_every_so_many_are_kept_and_what_is_kept_is_right(tmp_path):
    kept_run(tmp_path / "run", 100, Retention(8, 25)).close()
    steps = kept_steps(tmp_path / "run")
    assert set(range(93, 101)) | {0, 25, 50, 75} <= set(steps)
    assert len(steps) <= 4 + 1 + 8 + 2
    with LedgerReader(tmp_path / "run") as reader:
        for step in steps:
            expected = agree_and_leaves(step)[1].get("weights")
            found = reader.leaves(reader.record(step), "weights")
            assert found == {name: digest.hex() for name, digest in expected.items()}
        assert reader.leaves(reader.record(60), "weights") == {}
    report = verify_chain(tmp_path / "run")
    assert (report.sound, report.torn, report.records) == (True, False, 101)
    assert report.without_leaves == 101 - len(steps)


def test_files_stop_growing_and_the_records_are_those_of_a_ledger_that_keeps_all(tmp_path):
    writer = kept_run(tmp_path / "run", 40, Retention(10))
    early = leaf_bytes_in(tmp_path / "run")
    append_steps(writer, range(41, 400))
    writer.close()
    assert leaf_bytes_in(tmp_path / "run") <= early + 3 * 2 * 4 * 16
    whole = write_run(tmp_path / "whole", 399)
    assert leaf_bytes_in(whole) > 20 * leaf_bytes_in(tmp_path / "run")
    assert trace_at(whole, 399) == trace_at(tmp_path / "run", 399)


def test_a_difference_where_leaves_were_dropped_is_known_by_its_root(tmp_path):
    kept_run(tmp_path / "a", 60, Retention(5)).close()
    kept_run(tmp_path / "b", 60, Retention(5), changes=[(20, "weights", "layer.0.bias")]).close()
    with LedgerReader(tmp_path / "a") as a, LedgerReader(tmp_path / "b") as b:
        found = difference_at(a, b, 20)
        assert (found.tensors, found.kinds_without_leaves) == ((), ("weights",))
        assert [each.name for each in difference_at(a, b, 59).tensors] == ["layer.0.bias"]


@pytest.mark.parametrize("kind", ["weights", "gradients"])
def test_leaves_that_are_gone_without_a_line_that_drops_them_are_damage(tmp_path, kind):
    kept_run(tmp_path / "run", 30, Retention(8)).close()
    part = leaf_files(tmp_path / "run")[-1][1]
    path = leaf_path(tmp_path / "run", kind, part)
    path.unlink()
    report = verify_chain(tmp_path / "run")
    assert not report.sound
    assert path.name in report.damage.what and "no line says" in report.damage.what
    assert report.damage.step in range(22, 31)


@pytest.mark.parametrize("deletions", range(5))
def test_a_death_within_a_deletion_loses_nothing_that_was_to_be_kept(tmp_path, monkeypatch, deletions):
    """The process dies before the first, between two and after the last of the files that go."""
    writer = kept_run(tmp_path / "run", 30, Retention(4, 10))
    unlink, left = os.unlink, [deletions]

    def dying(path):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(path)

    monkeypatch.setattr(os, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
        append_steps(writer, range(31, 60))
    monkeypatch.undo()
    with LedgerReader(tmp_path / "run") as reader:
        last = reader.last_step
        trace = reader.record(last).trace
    wanted = {0, 10, 20, 30, *range(last - 3, last + 1)}
    assert wanted <= set(kept_steps(tmp_path / "run")) & set(kept_steps(tmp_path / "run", "gradients")) | {0}
    assert verify_chain(tmp_path / "run").sound
    writer = LedgerWriter.reopen(tmp_path / "run", step=last, trace=trace, environment={}, retention=Retention(4, 10))
    append_steps(writer, range(last + 1, last + 20))
    writer.close()
    assert verify_chain(tmp_path / "run").sound
    assert len({part for _, part in leaf_files(tmp_path / "run")}) <= 7


def test_a_writer_that_is_killed_while_it_deletes_keeps_what_it_was_told_to(tmp_path):
    path = tmp_path / "run"
    for _, report in kill_writers(path, 3, 50, kills=6, records=10, seed=3):
        last = report.last_step
        wanted = {*range(0, last + 1, 50), *range(last - 2, last + 1)}
        assert wanted <= set(kept_steps(path)) and wanted <= set(kept_steps(path, "gradients")) | {0}


def test_a_resumed_run_goes_on_dropping_and_cuts_off_torn_leaves_of_a_part(tmp_path):
    kept_run(tmp_path / "run", 20, Retention(4)).abandon()
    trace = trace_at(tmp_path / "run", 15)
    newest = leaf_path(tmp_path / "run", *leaf_files(tmp_path / "run")[-1])
    with open(newest, "ab") as torn:
        torn.write(b"7" * 40)
    report = verify_chain(tmp_path / "run")
    assert report.sound and report.torn_leaf_bytes == {"weights": 40}
    writer = LedgerWriter.reopen(tmp_path / "run", step=15, trace=trace, environment={}, retention=Retention(4))
    assert writer.torn_leaf_bytes == 40
    append_steps(writer, range(16, 41))
    writer.close()
    report = verify_chain(tmp_path / "run")
    assert (report.sound, report.torn, report.superseded) == (True, False, 5)
    assert set(kept_steps(tmp_path / "run")) >= {0, *range(37, 41)}
    assert trace_at(tmp_path / "run", 40) == trace_at(write_run(tmp_path / "whole", 40, recipe={}), 40)


def test_a_part_of_a_record_that_never_came_is_deleted_when_the_run_goes_on(tmp_path):
    kept_run(tmp_path / "run", 5, Retention(4)).abandon()
    lost = leaf_path(tmp_path / "run", "weights", (tmp_path / "run/ledger.jsonl").stat().st_size)
    lost.write_bytes(b"1" * 64)
    assert verify_chain(tmp_path / "run").torn_leaf_bytes == {"weights": 64}
    trace = trace_at(tmp_path / "run", 5)
    writer = LedgerWriter.reopen(tmp_path / "run", step=5, trace=trace, environment={}, retention=Retention(4))
    writer.close()
    assert writer.torn_leaf_bytes == 64 and not lost.exists()


def at_the_first_part_opened(monkeypatch, happens):
    """`happens()` runs once a reader has decided to open its first part, just before it does."""
    opens, left = leaf_file.open_regular, [happens]

    def opens_late(path):
        if left and path.stem.count("-") == 2:
            left.pop()()
        return opens(path)

    monkeypatch.setattr(leaf_file, "open_regular", opens_late)
    return left


def test_leaves_that_are_dropped_while_they_are_read_are_not_kept(tmp_path, monkeypatch):
    kept_run(tmp_path / "run", 20, Retention(8)).close()
    with LedgerReader(tmp_path / "run") as reader:
        record = reader.record(20)
        part = record.leaves["weights"].part
        left = at_the_first_part_opened(monkeypatch, leaf_path(tmp_path / "run", "weights", part).unlink)
        assert reader.leaves(record, "weights") == {} and not left


@pytest.mark.parametrize("later_steps", [3, 40])
def test_a_part_that_is_dropped_while_it_is_checked_is_no_damage(tmp_path, monkeypatch, later_steps):
    writer = kept_run(tmp_path / "run", 20, Retention(8))
    left = at_the_first_part_opened(monkeypatch, lambda: append_steps(writer, range(21, 21 + later_steps)))
    report = verify_chain(tmp_path / "run")
    assert report.sound and not left, report.damage
    assert report.without_leaves > 12 and report.torn_leaf_bytes.keys() <= {"weights", "gradients"}
    writer.close()


def test_a_part_that_is_gone_while_it_is_checked_is_damage_if_no_line_drops_it(tmp_path, monkeypatch):
    kept_run(tmp_path / "run", 20, Retention(8)).close()
    first = next(each for each in leaf_files(tmp_path / "run") if each[1] is not None)
    left = at_the_first_part_opened(monkeypatch, leaf_path(tmp_path / "run", *first).unlink)
    report = verify_chain(tmp_path / "run")
    assert not report.sound and "no line says" in report.damage.what and not left


def test_kinds_without_tensors_and_kinds_that_come_later_need_no_file(tmp_path):
    kept_run(tmp_path / "run", 30, Retention(4), kinds=("buffers",), names=()).close()
    assert leaf_files(tmp_path / "run") in ([], [("buffers", None)])
    assert verify_chain(tmp_path / "run").sound


def test_old_leaves_that_cannot_be_deleted_are_an_error_and_the_ledger_stays_sound(tmp_path, monkeypatch):
    writer = kept_run(tmp_path / "run", 4, Retention(2))

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(LedgerError, match="cannot be deleted"):
        append_steps(writer, range(5, 20))
    writer.abandon()
    assert verify_chain(tmp_path / "run").sound


@pytest.mark.parametrize(("last", "every"), [(0, None), (-1, None), (True, None), (2.0, None), (3, 0), (3, "7")])
def test_a_retention_of_nothing_is_refused(last, every):
    with pytest.raises(InputError, match="whole number from 1"):
        Retention(last, every)


@pytest.mark.parametrize("last", [1, 2, 4, 5, 16, 100])
def test_a_part_goes_only_after_enough_records_and_soon_after(last):
    parts, where, alive = LeafParts(Retention(last), []), {}, set()
    for step in range(1, 400):
        part = parts.part_of(step, 1000 + step)
        where[step], alive = part, alive | {part}
        alive -= set(parts.recorded(part))
        kept = [each for each in range(1, step + 1) if where[each] in alive]
        assert set(kept) >= set(range(max(1, step - last + 1), step + 1))
        assert len(kept) <= last + max(1, last // 4)


@settings(max_examples=40)
@given(
    last=st.integers(1, 9),
    every=st.one_of(st.none(), st.integers(1, 7)),
    stretches=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), min_size=1, max_size=5),
)
def test_any_sequence_of_stretches_and_resumes_keeps_what_it_should(last, every, stretches):
    """stretches: records to write, how far the next start goes back, whether this one says that it was finished."""
    with tempfile.TemporaryDirectory() as folder:
        path, retention, step = Path(folder, "run"), Retention(last, every), -1
        writer = LedgerWriter.create(path, recipe={}, environment={}, entry={}, retention=retention)
        written: list[int] = []
        for length, back, finished in stretches:
            for _ in range(length):
                step += 1
                append_steps(writer, [step])
                written.append(step)
            if finished:
                writer.close()
            writer.abandon()
            report = verify_chain(path)
            assert report.sound and not report.torn, report.damage
            if step < 0:
                return
            kept = set(kept_steps(path))
            assert {each for each in written[-last:] if each <= step} <= kept  # not behind a resume
            assert {each for each in range(step + 1) if retention.keeps_for_good(each)} <= kept
            with LedgerReader(path) as reader:
                for each in kept:
                    digests = agree_and_leaves(each)[1]["weights"]
                    assert reader.leaves(reader.record(each), "weights") == {n: d.hex() for n, d in digests.items()}
            step = max(0, step - back)
            trace = trace_at(path, step)
            writer = LedgerWriter.reopen(path, step=step, trace=trace, environment={}, retention=retention)
        writer.abandon()


def test_a_run_that_goes_on_dropping_leaves_can_be_read_and_checked_meanwhile(tmp_path):
    path, known = tmp_path / "run", tmp_path / "known"
    process = start_writer(path, known, 3, 50)
    try:
        while process.poll() is None and (not known.exists() or known.read_text().count("\n") < 3):
            time.sleep(0.01)
        for _ in range(25):
            report = verify_chain(path)
            assert report.sound, report.damage
            with LedgerReader(path) as reader:
                for step in range(max(0, reader.last_step - 5), reader.last_step + 1):
                    found = reader.leaves(reader.record(step), "weights")
                    digests = agree_and_leaves(step)[1]["weights"]
                    assert found in ({}, {name: digest.hex() for name, digest in digests.items()})
    finally:
        process.kill()
        process.communicate()
