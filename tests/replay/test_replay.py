"""A recorded run is run again at any split; where code or state changed, the replay says at which step."""

import pytest

from det_lightning.bisection.flipped_bit import flipped_bit
from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import replay, tensors_at
from tests.claims.processes import Failed, in_new_process
from tests.replay import recorded
from tests.replay.recorded import ENTRY, STEPS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    weights = in_new_process(recorded.record, folder, save_every=5)
    return folder / "ledger", weights


def replayed(path, **options):
    return in_new_process(replay, path, **options)


@pytest.mark.parametrize("split", [{}, {"world": 2}, {"world": 3, "accumulate": 2}, {"accumulate": 5}])
def test_a_replay_at_any_split_agrees_with_the_record(run, split):
    result = replayed(run[0], **split)
    assert result.matched and result.first is None
    assert (result.start, result.steps) == (0, STEPS)


def test_a_range_begins_at_the_nearest_checkpoint(run):
    result = replayed(run[0], start=11, stop=13)
    assert result.matched
    assert (result.start, result.steps) == (10, 3)


def test_a_replay_from_a_checkpoint_records_the_same_traces(run, tmp_path):
    replayed(run[0], start=10, out=tmp_path / "again")
    with LedgerReader(run[0]) as reference, LedgerReader(tmp_path / "again") as again:
        assert again.resumed_from == {"step": 10, "trace": reference.record(10).trace}
        assert again.record(STEPS).trace == reference.record(STEPS).trace


@pytest.mark.parametrize(("entry", "step"), [("build_changed", 9), ("build_with_another_rate", 1)])
def test_changed_code_is_found_at_its_first_step_and_the_replay_stops_there(run, entry, step):
    result = replayed(run[0], entry=f"tests.replay.recorded:{entry}")
    assert not result.matched
    assert result.first.step == step
    assert result.steps == step


@pytest.mark.parametrize(("counter", "first"), [("attribute", 11), ("buffer", None)])
def test_state_that_no_checkpoint_holds_is_noticed_by_a_replay_from_one(tmp_path, counter, first):
    in_new_process(recorded.record, tmp_path, save_every=5, counter=counter)
    assert replayed(tmp_path / "ledger").matched, "from the first step on an attribute is what it was"
    result = replayed(tmp_path / "ledger", start=11)
    assert (result.first.step if result.first else None) == first


def test_the_weights_of_a_step_are_computed_again_to_the_byte(run):
    weights = in_new_process(tensors_at, run[0], STEPS)
    assert {name: value.tobytes() for name, value in weights.items()} == run[1]


def test_a_flipped_bit_is_named_from_two_ledgers_and_a_replay(run, tmp_path):
    in_new_process(recorded.record, tmp_path, fault=(7, "first.weight", 29, 13))
    with LedgerReader(run[0]) as reference, LedgerReader(tmp_path / "ledger") as candidate:
        first = compare_ledgers(reference, candidate).first
    (tensor,) = [each for each in first.tensors if each.kind == "weights"]
    assert (first.step, tensor.name) == (7, "first.weight")
    assert "gradients" in first.agreeing and "loss" in first.agreeing
    clean = in_new_process(tensors_at, run[0], 7)["first.weight"]
    found = flipped_bit(clean, bytes.fromhex(tensor.reference), bytes.fromhex(tensor.candidate))
    assert (found.index, found.bit) == ((3, 5), 13)


def test_a_faulty_run_does_not_reproduce_itself(tmp_path):
    in_new_process(recorded.record, tmp_path, fault=(3, "second.bias", 1, 30))
    result = replayed(tmp_path / "ledger")
    assert not result.matched
    assert result.first.step == 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("tests.replay.recorded:nothing", "cannot be imported"),
        ("tests.replay.nowhere:build", "cannot be imported"),
        ("tests.replay.recorded", "cannot be imported"),
        ("tests.replay.recorded:build_something_else", "returned int"),
        ("tests.replay.recorded:build_that_raises", "the data set is gone"),
    ],
)
def test_an_entry_that_cannot_build_the_run_says_why(run, entry, message):
    with pytest.raises(Failed, match=message):
        replayed(run[0], entry=entry)


@pytest.mark.parametrize(
    "options", [{"start": 5, "stop": 4}, {"stop": STEPS + 1}, {"start": -1}, {"world": 0}, {"accumulate": 0}]
)
def test_a_range_or_split_that_does_not_exist_is_refused(run, options):
    with pytest.raises(InputError):
        replay(run[0], **options)


def test_only_weights_are_rebuilt(run):
    with pytest.raises(InputError, match="gradients"):
        tensors_at(run[0], 1, kind="gradients")


def test_a_stock_run_is_replayed_at_its_own_split_and_refused_at_another(tmp_path):
    from tests.callbacks.recorded_runs import record_under_ddp

    in_new_process(record_under_ddp, tmp_path / "ledger")
    result = replayed(tmp_path / "ledger", entry=ENTRY)
    assert (result.matched, result.steps) == (True, 5)
    with pytest.raises(LedgerError, match=r"stock DDPStrategy.*--world 1 --accumulate 1"):
        replay(tmp_path / "ledger", entry=ENTRY, accumulate=2)
