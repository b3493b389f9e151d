"""Public reports that a ledger answers: what differs, and whether it is the hardware, the seed, the threads or the run."""

import json

import pytest

from det_lightning.bisection.operation_log import GRADIENTS, read_log
from det_lightning.ledger.store import LedgerReader
from tests.claims.processes import in_new_process
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import ENVIRONMENT, write_run
from tests.replay.planted import PLANTED_STEP, record


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "ledger"
    in_new_process(record, path)
    return path


def bisect(*arguments):
    code, out, _ = answer(["bisect", *map(str, arguments), "--json"])
    return code, json.loads(out)


def test_c06_gradients_differ_between_ranks_before_the_reduction_and_agree_after_it(run, tmp_path):
    """Per-rank gradients that are the same before an all-reduce and differ after it, or the reverse, would show here."""
    logs = in_new_process(record_two_ranks, run, tmp_path)
    after = [next(each for each in log if each.name == GRADIENTS).outputs for log in logs]
    assert [each.digest for each in after[0]] == [each.digest for each in after[1]]
    with LedgerReader(run) as reader:
        recorded = reader.leaves(reader.record(PLANTED_STEP), "gradients")
    assert {each.name.removeprefix("gradients "): each.digest for each in after[0]} == recorded
    before = [
        {v.digest for each in log if each.name == "det.gemm.add_gemm_digits" for v in each.outputs} for log in logs
    ]
    assert before[0] and before[1] and before[0].isdisjoint(before[1])


def record_two_ranks(ledger, folder):
    from det_lightning.replay.sides import Side, SideRunner
    from det_lightning.replay.step_recorder import Recording

    recording = Recording(PLANTED_STEP, folder / "two", {})
    with SideRunner(folder) as runner:
        outcome = runner.run(Side(ledger), recording, world=2, accumulate=1)
    assert outcome.reproduced
    return [read_log(recording.log(rank)) for rank in range(2)]


def test_c48_two_seeds_give_two_ledgers(run, tmp_path):
    in_new_process(record, tmp_path / "other", seed=5)
    code, told = bisect(run, tmp_path / "other", "--recipe-may-differ")
    assert (code, told["first"]["step"]) == (1, 1)
    assert [each["name"] for each in told["headers"] if each["part"] == "recipe"] == ["data.seed"]
    assert bisect(run, tmp_path / "other")[0] == 125


def test_c55_other_hardware_is_told_before_any_step(tmp_path):
    a = write_run(tmp_path / "a", 4, environment=ENVIRONMENT | {"device": "cuda:0", "processor": "A100"})
    other = ENVIRONMENT | {"device": "cuda:0", "processor": "H100"}
    b = write_run(tmp_path / "b", 4, environment=other, changes=[(2, "weights", "layer.0.bias")])
    code, out, _ = answer(["bisect", str(a), str(b)])
    lines = out.splitlines()
    assert code == 1
    assert next(i for i, line in enumerate(lines) if "A100" in line and "H100" in line) < next(
        i for i, line in enumerate(lines) if line.startswith("diverge")
    )


def test_c56_other_thread_counts_give_the_same_ledger_and_stand_in_its_header(run, tmp_path):
    in_new_process(record_with_threads, tmp_path / "threads", 4)
    code, told = bisect(run, tmp_path / "threads")
    assert (code, told["verdict"]) == (0, "match")
    assert "threads" in [each["name"] for each in told["headers"]]


def record_with_threads(path, threads):
    import torch

    torch.set_num_threads(threads)
    record(path)


def test_c62_the_same_command_twice_gives_the_same_ledger(run, tmp_path):
    in_new_process(record, tmp_path / "again")
    code, told = bisect(run, tmp_path / "again")
    assert (code, told["verdict"], told["headers"]) == (0, "match", [])
