"""Planted divergences of fifteen kinds: each is located to its step and tensor, and to the operation where there is one."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from det_lightning.ledger.store import LedgerReader
from tests.claims.processes import in_new_process
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import ENVIRONMENT, write_run
from tests.replay.planted import PLANTED_STEP, record, record_on_ranks


@dataclass(frozen=True)
class Planted:
    """One change and what bisect must say of it.

    step: first divergent step. kinds: of state that differ there. inside: fields of the operation. tensor: that the
    operation works on. sample: data set index.
    """

    plant: str
    step: int
    kinds: set[str]
    inside: dict[str, Any] = field(default_factory=dict)
    tensor: str = ""
    sample: int | None = None
    reference: str = ""
    options: dict[str, Any] = field(default_factory=dict)


ALL = {"weights", "gradients", "optimizer"}
DATA = {"kind": "data", "name": "batch"}
CASES = [
    Planted("rate", 1, {"weights"}, {"name": "aten.lift_fresh", "phase": "update"}, "weights first.weight"),
    Planted("sample", 3, ALL, DATA, "batch[0]", 30),
    Planted("pixel", 4, {"gradients", "optimizer"}, DATA, "batch[0]", 17),
    Planted("augmentation", 1, ALL, DATA, "batch[0]", 3),
    Planted(
        "dropout",
        PLANTED_STEP,
        ALL,
        {"kind": "operation", "name": "aten.bernoulli_.float", "phase": "forward"},
        options={"strategy": "auto", "dropout": True},
    ),
    Planted("scheduler", 4, {"weights"}, {"name": "aten.lift_fresh", "phase": "update"}, "weights first.weight"),
    Planted("decay", 1, {"weights", "optimizer"}, {"kind": "code", "phase": "update"}, "weights first.bias"),
    Planted("nan", PLANTED_STEP, ALL, {"kind": "argument", "name": "aten.mul.Tensor", "phase": "forward"}),
    Planted(
        "order", PLANTED_STEP, ALL, {"kind": "input", "module": "middle", "phase": "forward"}, "weights middle.weight"
    ),
    Planted("eps changed", 1, {"weights"}, {"name": "aten.lift_fresh", "phase": "update"}, reference="eps"),
    Planted(
        "eps changed",
        1,
        {"weights"},
        {"kind": "argument", "name": "aten.add_.Tensor", "phase": "update"},
        "weights first.weight",
        reference="eps",
        options={"strategy": "auto"},
    ),
    Planted(
        "average",
        PLANTED_STEP,
        {"buffers"},
        {"kind": "input", "name": "aten.mul.Tensor", "phase": "update"},
        "weights first.weight",
        options={"average": True},
    ),
    Planted("code", PLANTED_STEP, ALL, {"kind": "argument", "name": "aten.mul.Tensor", "module": ""}),
    Planted(
        "code",
        PLANTED_STEP,
        ALL,
        {"kind": "argument", "name": "aten.mul.Tensor"},
        options={"precision": "bf16-mixed"},
    ),
    Planted(
        "rank",
        PLANTED_STEP,
        ALL,
        {"kind": "code", "name": "aten.mul.Tensor", "phase": "forward", "rank": 1},
        "weights last.weight",
        options={"world": 2},
    ),
    Planted("gradient", PLANTED_STEP, ALL, {"kind": "code", "name": "aten.zero_"}, "gradients middle.bias"),
    Planted(
        "foreign",  # what only looks at the run, on both ranks or on rank 0, is accused of nothing
        PLANTED_STEP,
        {"weights"},
        {"kind": "state after", "rank": 0},
        "weights first.weight",
        options={"world": 2},
    ),
    *(
        Planted(plant, PLANTED_STEP, kinds, inside, tensor, options={"strategy": "auto", "noisy": True})
        for plant, kinds, inside, tensor in (  # beside a clock that is logged, and reaches nothing
            ("gradient", ALL, {"kind": "code", "name": "aten.zero_"}, "gradients middle.bias"),
            ("foreign", {"weights"}, {"kind": "state after"}, "weights first.weight"),
        )
    ),
    Planted(
        "backward",
        PLANTED_STEP,
        ALL,
        {"kind": "code", "name": "aten.mul.Tensor", "phase": "backward", "node": "SkewedBackward"},
        options={"strategy": "auto"},
    ),
    Planted(
        "average",
        PLANTED_STEP,
        {"buffers"},
        {"kind": "input", "name": "aten.mul.Tensor"},
        "weights first.weight",
        options={"average": True, "strategy": "auto", "noisy": True},
    ),
    Planted(
        "buffer",
        PLANTED_STEP,
        {"buffers"},
        {"kind": "code", "name": "c10d.allreduce_", "phase": "forward"},
        "buffers level",
        options={"world": 2, "strategy": "ddp", "shared_buffer": True},
    ),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(plant, options) -> the ledger of that run, recorded once."""
    recorded = {}

    def reference(plant: str, options: dict[str, Any]):
        key = plant, json.dumps(options, sort_keys=True)
        if key not in recorded:
            recorded[key] = tmp_path_factory.mktemp("reference") / "ledger"
            in_new_process(record_on_ranks, recorded[key], plant=plant, **options)
        return recorded[key]

    return reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case.plant, *case.options))))
def test_a_planted_change_is_located(references, tmp_path, case):
    reference = references(case.reference, case.options)
    code, told = in_new_process(plant_and_bisect, reference, tmp_path / "ledger", case)
    first, inside = told["first"], told["inside"]
    assert (code, first["step"]) == (1, case.step)
    assert {each["name"] for each in first["roots"]} == case.kinds
    assert {each["kind"] for each in first["tensors"]} == case.kinds
    assert inside["verdict"] == "found", inside["reason"]
    operation = inside["difference"]["candidate"] or inside["difference"]["reference"]
    seen = operation | {"kind": inside["difference"]["kind"], "rank": inside["rank"]}
    assert {name: seen[name] for name in case.inside} == case.inside
    assert inside["element"]["reference_bits"] != inside["element"]["candidate_bits"]
    if case.inside.get("kind") == "input":
        assert "read different tensors in this place" in inside["difference"]["meaning"]
    if case.tensor:
        assert inside["tensor"] == case.tensor
    if case.sample is not None:
        assert inside["sample"] == case.sample


def plant_and_bisect(reference, candidate, case: Planted) -> tuple[int, dict]:
    record_on_ranks(candidate, plant=case.plant, **case.options)
    code, out, err = answer(["bisect", str(reference), str(candidate), "--replay", "--recipe-may-differ", "--json"])
    assert out, err
    return code, json.loads(out)


@pytest.mark.parametrize("options", [{}, {"world": 2, "strategy": "ddp"}], ids=["det", "ddp"])
def test_a_flipped_bit_is_called_transient_and_named(references, tmp_path, options):
    fault = (PLANTED_STEP, "middle.weight", 8, 13)
    case = Planted("", PLANTED_STEP, {"weights"}, options=options | {"fault": fault})
    code, told = in_new_process(plant_and_bisect, references("", options), tmp_path / "ledger", case)
    assert (code, told["first"]["step"], told["inside"]["verdict"]) == (1, PLANTED_STEP, "transient")
    assert (told["flip"]["tensor"], told["flip"]["flip"]["index"], told["flip"]["flip"]["bit"]) == (
        "middle.weight",
        [1, 2],
        13,
    )


def test_a_step_whose_leaves_were_dropped_is_searched_by_replays(references, tmp_path):
    case = Planted("code", 2, ALL, options={"kept": 1})
    code, told = in_new_process(plant_and_bisect, references("", {"kept": 1}), tmp_path / "ledger", case)
    first, inside = told["first"], told["inside"]
    assert (code, first["tensors"], set(first["kinds_without_leaves"])) == (1, [], ALL)
    assert inside["verdict"] == "found" and inside["element"] is not None
    text = answer(["bisect", str(references("", {"kept": 1})), str(tmp_path / "ledger")])[1]
    assert f"leaves of step {first['step']} were not kept" in text and "bisect --replay" in text


def test_a_library_version_in_the_header_is_told_and_blamed_for_nothing(tmp_path):
    reference = write_run(tmp_path / "a", 6)
    candidate = write_run(
        tmp_path / "b", 6, environment=ENVIRONMENT | {"versions": {"torch": "2.14.0"}, "world_size": 2}
    )
    code, out, _ = answer(["bisect", str(reference), str(candidate), "--json"])
    told = json.loads(out)
    assert (code, told["verdict"], told["first"]) == (0, "match", None)
    assert [each["name"] for each in told["headers"]] == ["versions.torch", "world_size"]


def test_recording_the_operations_of_a_step_changes_no_bit(references, tmp_path):
    ledger = references("", {})
    outcome = in_new_process(record_operations, ledger, tmp_path)
    with LedgerReader(ledger) as reader:
        assert outcome.reproduced and outcome.trace == reader.record(PLANTED_STEP).trace


def record_operations(ledger, folder):
    from det_lightning.replay.sides import Side, SideRunner
    from det_lightning.replay.step_recorder import Recording

    recording = Recording(PLANTED_STEP, folder, {0: (5, 20, 40)})
    with SideRunner(folder) as runner:
        outcome = runner.run(Side(ledger), recording, world=None, accumulate=None)
    assert recording.log(0).stat().st_size > 0 and recording.tensors(0).is_file()
    return outcome


def test_a_side_that_does_not_reproduce_its_ledger_is_not_judged(references, tmp_path):
    case = Planted("code", PLANTED_STEP, ALL)
    code, told = in_new_process(bisect_with_lost_code, references("", {}), tmp_path / "ledger", case)
    assert code == 125
    assert told["inside"]["verdict"] == "cannot be judged"
    assert "the replay of the candidate leaves its own ledger at step 1" in told["inside"]["reason"]


def bisect_with_lost_code(reference, candidate, case):
    """The candidate was recorded with code that is gone: its entry now builds another run."""
    record(candidate, plant="code")
    entries = ["--entry", "tests.replay.planted:build", "--entry", "tests.replay.planted:build_with_another_rate"]
    code, out, _ = answer(["bisect", str(reference), str(candidate), "--replay", "--json", *entries])
    return code, json.loads(out)
