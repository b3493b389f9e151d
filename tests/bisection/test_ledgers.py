import time

import pytest

from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.bisection.search import DIVERGE, MATCH, UNKNOWN
from det_lightning.errors import LedgerError
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.ledger.example_runs import ENVIRONMENT, NAMES, RECIPE, append_steps, trace_at, write_run


def compared(a, b, **options):
    with LedgerReader(a) as reference, LedgerReader(b) as candidate:
        return compare_ledgers(reference, candidate, **options)


@pytest.mark.parametrize("step", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("names", [NAMES[1:2], NAMES[1:3]])
def test_the_first_divergent_step_and_its_tensors_are_found(tmp_path, step, names):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, changes=[(step, "weights", name) for name in names])
    found = compared(a, b)
    assert (found.verdict, found.reason) == (DIVERGE, f"the runs diverge at step {step}")
    assert (found.first.step, found.first.last_match) == (step, step - 1 if step else None)
    assert [(each.kind, each.name) for each in found.first.tensors] == [("weights", name) for name in names]
    assert found.first.fields == ()
    assert ("gradients" in found.first.agreeing) == (step > 0)


def test_a_difference_that_heals_is_still_found_because_traces_remember(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, fields={5: {"loss": "0" * 16}})
    found = compared(a, b)
    assert (found.first.step, [each.name for each in found.first.fields]) == (5, ["loss"])


def test_equal_runs_match_in_any_environment(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, environment=ENVIRONMENT | {"world_size": 3})
    found = compared(a, b)
    assert (found.verdict, found.first) == (MATCH, None)
    assert [each.name for each in found.headers] == ["world_size"]
    assert compared(a, a).verdict is MATCH


def test_other_recipes_cannot_be_judged_unless_they_may_differ(tmp_path):
    a = write_run(tmp_path / "a", 4)
    b = write_run(tmp_path / "b", 4, recipe=RECIPE | {"seed": 2})
    found = compared(a, b)
    assert (found.verdict, "the recipes differ (seed)" in found.reason) == (UNKNOWN, True)
    assert compared(a, b, recipe_may_differ=True).verdict is MATCH


def test_ledgers_of_unequal_length_match_on_the_steps_that_both_hold(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 7)
    found = compared(a, b)
    assert (found.verdict, found.first_common, found.last_common) == (MATCH, 0, 7)
    c = write_run(tmp_path / "c", 20, changes=[(9, "weights", NAMES[0])])
    assert compared(a, c).first.step == 9
    assert compared(b, c).verdict is MATCH


def test_a_resumed_ledger_is_compared_by_the_records_that_count(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 9, close=False, changes=[(7, "weights", NAMES[0])])
    assert compared(a, b).first.step == 7
    writer = LedgerWriter.reopen(b, step=6, trace=trace_at(b, 6), environment={})
    append_steps(writer, range(7, 13))
    writer.close()
    assert compared(a, b).verdict is MATCH
    writer = LedgerWriter.reopen(b, step=8, trace=trace_at(b, 8), environment={})
    append_steps(writer, range(9, 12), changes=[(10, "gradients", NAMES[0])])
    writer.close()
    assert compared(a, b).first.step == 10


def test_a_run_continued_in_a_second_ledger_is_compared_from_there(tmp_path):
    a = write_run(tmp_path / "a", 12)
    state = {"step": 6, "trace": trace_at(a, 6)}
    b = write_run(tmp_path / "b", 12, first=7, resumed_from=state)
    assert (compared(a, b).verdict, compared(a, b).first_common) == (MATCH, 7)
    c = write_run(tmp_path / "c", 12, first=7, resumed_from=state, changes=[(9, "weights", NAMES[0])])
    assert (compared(a, c).first.step, compared(c, a).first.step) == (9, 9)


def test_runs_that_diverged_before_the_first_common_step_are_said_to_have(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, first=7, resumed_from={"step": 6, "trace": "11" * 32})
    found = compared(a, b)
    assert found.verdict is DIVERGE
    assert found.reason == "the runs diverged before step 7, the first that both ledgers hold"


def test_a_later_start_that_names_no_state_proves_nothing_but_shows_a_difference(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, first=7)
    found = compared(a, b)
    assert (found.verdict, "does not say from which record" in found.reason) == (UNKNOWN, True)
    c = write_run(tmp_path / "c", 12, first=7, changes=[(9, "weights", NAMES[0])])
    assert (compared(a, c).verdict, compared(a, c).first.step) == (DIVERGE, 9)


def test_ledgers_that_recorded_other_things_are_compared_on_what_both_have(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, kinds=["weights"])
    found = compared(a, b)
    assert (found.verdict, "only one ledger recorded gradients" in found.reason) == (UNKNOWN, True)
    c = write_run(tmp_path / "c", 12, kinds=["weights"], changes=[(9, "weights", NAMES[0])])
    assert (compared(a, c).verdict, compared(a, c).first.step) == (DIVERGE, 9)


def test_ledgers_without_a_common_step_cannot_be_judged(tmp_path):
    a = write_run(tmp_path / "a", 4)
    b = write_run(tmp_path / "b", 9, first=7)
    empty = write_run(tmp_path / "empty", -1)
    for other in (b, empty):
        assert (compared(a, other).verdict, compared(a, other).first_common) == (UNKNOWN, None)


def test_a_torn_last_line_is_judged_on_the_whole_records(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12, close=False)
    content = (b / "ledger.jsonl").read_bytes()
    (b / "ledger.jsonl").write_bytes(content[:-10])
    assert (compared(a, b).verdict, compared(a, b).last_common) == (MATCH, 11)


def test_a_damaged_line_is_never_taken_for_a_divergence(tmp_path):
    a = write_run(tmp_path / "a", 12)
    b = write_run(tmp_path / "b", 12)
    content = (b / "ledger.jsonl").read_bytes()
    place = content.index(trace_at(b, 12).encode())
    changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    (b / "ledger.jsonl").write_bytes(changed)
    with pytest.raises(LedgerError, match="is damaged at the line"):
        compared(a, b)


def test_long_ledgers_are_compared_by_reading_a_few_lines(tmp_path):
    a = write_run(tmp_path / "a", 2000, close=False)
    b = write_run(tmp_path / "b", 2000, changes=[(1311, "gradients", NAMES[0])], close=False)
    start = time.process_time()
    assert compared(a, b).first.step == 1311
    assert time.process_time() - start < 0.5


@pytest.mark.slow
def test_ledgers_of_20000_steps_and_50_tensors_are_answered_in_under_two_seconds(tmp_path):
    names = tuple(f"layer.{i}.weight" for i in range(50))
    a = write_run(tmp_path / "a", 20_000, names=names, close=False)
    b = write_run(tmp_path / "b", 20_000, names=names, close=False, changes=[(13_337, "weights", "layer.7.weight")])
    start = time.process_time()
    found = compared(a, b)
    assert time.process_time() - start < 2
    assert (found.first.step, [each.name for each in found.first.tensors]) == (13_337, ["layer.7.weight"])
