from det_lightning.bisection.difference_counts import count_differences
from det_lightning.ledger.store import LedgerReader
from tests.ledger.example_runs import NAMES, write_run


def counted(a, b, **options):
    with LedgerReader(a) as reference, LedgerReader(b) as candidate:
        return count_differences(reference, candidate, **options)


def test_steps_and_tensors_that_differ_are_counted_by_kind(tmp_path):
    a = write_run(tmp_path / "a", 9)
    changes = [(4, "weights", NAMES[0]), (7, "weights", NAMES[1]), (9, "gradients", NAMES[2])]
    b = write_run(tmp_path / "b", 12, changes=changes, fields={2: {"loss": "0" * 16}})
    found = counted(a, b)
    weights, gradients = found.kinds
    assert (found.steps, found.steps_differ, found.fields) == (10, 7, {"loss": 1})
    assert (weights.kind, weights.steps, weights.steps_differ) == ("weights", 10, 6)
    assert (weights.tensors, weights.tensors_differ) == (set(NAMES), set(NAMES[:2]))
    assert (gradients.kind, gradients.steps, gradients.steps_differ) == ("gradients", 9, 1)
    assert gradients.tensors_differ == {NAMES[2]}


def test_equal_runs_and_what_only_one_recorded_count_as_no_difference(tmp_path):
    a = write_run(tmp_path / "a", 9)
    b = write_run(tmp_path / "b", 9, kinds=["weights"])
    assert counted(a, a).steps_differ == 0
    found = counted(a, b)
    assert (found.steps_differ, [each.kind for each in found.kinds]) == (0, ["weights"])


def test_a_later_start_is_counted_from_the_first_common_step(tmp_path):
    a = write_run(tmp_path / "a", 9)
    b = write_run(tmp_path / "b", 9, first=6, changes=[(8, "weights", NAMES[0])])
    found = counted(a, b)
    assert (found.steps, found.steps_differ) == (4, 2)
    c = write_run(tmp_path / "c", 3)
    assert counted(c, b).steps == 0


def test_progress_is_told(tmp_path):
    a = write_run(tmp_path / "a", 600, kinds=["weights"], names=("a",))
    seen = []
    counted(a, a, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(256, 601), (512, 601)]


def test_of_a_long_run_a_spread_of_steps_and_the_first_divergence_are_read(tmp_path):
    a = write_run(tmp_path / "a", 300)
    b = write_run(tmp_path / "b", 300, changes=[(217, "weights", NAMES[0])])
    found = counted(a, b, most_steps=30)
    assert (found.steps, found.looked_at, found.first) == (301, 30, 217)
    assert 0 < found.steps_differ < 15
    assert found.kinds[0].tensors_differ == {NAMES[0]}
    every = counted(a, b, most_steps=None)
    assert (every.looked_at, every.steps_differ, every.first) == (301, 84, 217)
    assert counted(a, a, most_steps=30).steps_differ == 0
