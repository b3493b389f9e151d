"""Inside a step: runs it twice on both sides with every operation recorded, and names the first that differs.

The first pass finds the operation by digests, the second keeps its tensors. Nothing is accused unless both passes agree
on both sides and each side reproduces its own ledger.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from det_lightning.bisection.element import ElementDifference, element_difference
from det_lightning.bisection.operation_log import BATCH, Operation, read_log
from det_lightning.bisection.operations import (
    DATA,
    STATE_AFTER,
    STATE_BEFORE,
    OperationDifference,
    concerned_tensor,
    digests_in,
    first_operation,
    reaches,
)
from det_lightning.errors import LedgerError
from det_lightning.replay.run import array_of
from det_lightning.replay.sides import Outcome, Side, SideRunner
from det_lightning.replay.step_recorder import Recording

FOUND, NOT_REPRODUCED, TRANSIENT, OUTSIDE = "found", "cannot be judged", "transient", "outside the operations"


@dataclass(frozen=True)
class StepFinding:
    """What a replay of the first divergent step on both sides showed.

    Attributes:
        verdict: FOUND; TRANSIENT, the candidate's code and data give the reference's record, so that neither made the
            difference; OUTSIDE, both sides reproduce their records but no recorded operation differs; NOT_REPRODUCED,
            the third verdict.
        reason: one sentence.
        rank: of the process in which it happened first, None if nothing was found.
        difference: the operation.
        element: the first differing element of the tensor that `difference` names, None if there is none.
        tensor: name of the weight, buffer or other state that the operation works on, empty if there is none.
        sample: data set index of the sample it belongs to, where the first dimension runs over known samples.
        before: the operations of that rank before it, for a report.
    """

    verdict: str
    reason: str
    rank: int | None = None
    difference: OperationDifference | None = None
    element: ElementDifference | None = None
    tensor: str = ""
    sample: int | None = None
    before: tuple[Operation, ...] = ()


def search_step(
    reference: Side,
    candidate: Side,
    step: int,
    *,
    world: int | None = None,
    accumulate: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepFinding:
    """Replays step `step` of both sides at one split and compares their operations.

    Raises:
        DetError and whatever the code of a side raises.
    """
    tell = progress or (lambda _: None)
    with (
        tempfile.TemporaryDirectory(prefix="det-lightning-bisect-") as scratch,
        SideRunner(Path(scratch)) as runner,
    ):

        def run(name: str, side: Side, capture: dict[int, tuple[int, ...]]) -> tuple[Outcome, Path]:
            tell(f"replaying the {name.replace('-', ', ')}")
            folder = Path(scratch, name)
            outcome = runner.run(side, Recording(step, folder, capture), world=world, accumulate=accumulate)
            return outcome, folder

        runner.start(reference)
        runner.start(candidate)
        ours, our_folder = run("reference-first pass", reference, {})
        refusal = _not_reproduced("reference", ours, step)
        if refusal is not None:
            return refusal
        theirs, their_folder = run("candidate-first pass", candidate, {})
        if theirs.step == step and theirs.reached and not theirs.reproduced and theirs.trace == ours.trace:
            again, _ = run("candidate-second pass", candidate, {})
            if again.trace != ours.trace:
                return StepFinding(NOT_REPRODUCED, f"two replays of the candidate's step {step} gave unequal records")
            return StepFinding(
                TRANSIENT,
                f"run again, twice, the candidate's step {step} is the reference's: its code and data did not make the "
                f"difference, so it was a fault of the machine or something from outside the entry",
            )
        refusal = _not_reproduced("candidate", theirs, step)
        if refusal is not None:
            return refusal
        found = _first_over_ranks(our_folder, their_folder)
        if found is None:
            return StepFinding(OUTSIDE, "no recorded operation differs, yet the records do")
        rank, difference, log = found
        their_log = read_log(their_folder / f"operations-{rank}.jsonl")
        captures = [{rank: (each.index,)} for each in difference.shown] if difference.shown else [{}, {}]
        for place, (name, side, capture, first) in enumerate(
            (("reference", reference, captures[0], ours), ("candidate", candidate, captures[1], theirs))
        ):
            outcome, again = run(f"{name}-second pass", side, capture)
            accused = [
                (difference.reference, difference.candidate)[place],
                *(difference.shown or ())[place : place + 1],
            ]
            repeated = _repeats(again, rank, [each for each in accused if each is not None])
            if outcome.trace == first.trace and not repeated and not reaches(difference, their_log, digests_in(log)):
                return StepFinding(
                    OUTSIDE,
                    "no recorded operation differs that has an effect on the state and repeats itself, yet the records do",
                )
            if outcome.trace != first.trace or not repeated:
                return StepFinding(
                    NOT_REPRODUCED,
                    f"two replays of the {name}'s step {step} differ from each other at operation {difference.index}, so "
                    f"nothing can be blamed on it: the step does not repeat itself",
                )
        element = _element(Path(scratch), rank, difference)
        return StepFinding(
            FOUND,
            "",
            rank=rank,
            difference=difference,
            element=element,
            tensor=_tensor(Path(scratch), rank, difference),
            sample=_sample(log, difference, element),
            before=tuple(log[: difference.index + 1]),
        )


def _not_reproduced(name: str, outcome: Outcome, step: int) -> StepFinding | None:
    if outcome.reproduced:
        return None
    what = f" in {', '.join(outcome.differs)}" if outcome.differs else ""
    return StepFinding(
        NOT_REPRODUCED,
        f"the replay of the {name} leaves its own ledger at step {outcome.step}{what}, so it shows nothing about step "
        f"{step}: it was recorded with other code, data or libraries than are here"
        + ("" if outcome.step < step else ", or by a fault that does not repeat"),
    )


def _first_over_ranks(ours: Path, theirs: Path) -> tuple[int, OperationDifference, list[Operation]] | None:
    """(rank, difference, the reference's log): ranks run one program, so the lowest index came first."""
    found = []
    for path in sorted(ours.glob("operations-*.jsonl")):
        other = theirs / path.name
        if not other.is_file():
            raise LedgerError(f"the candidate recorded no operations on rank {path.stem.rpartition('-')[2]}")
        log = read_log(path)
        difference = first_operation(log, read_log(other))
        if difference is not None:
            found.append((difference.index, int(path.stem.rpartition("-")[2]), difference, log))
    if not found:
        return None
    _, rank, difference, log = min(found, key=lambda each: each[:2])
    return rank, difference, log


def _repeats(pass_folder: Path, rank: int, operations: list[Operation]) -> bool:
    """Whether a second pass ran these operations again, with the same inputs and results; memory is laid out anew."""
    again = read_log(pass_folder / f"operations-{rank}.jsonl")
    for one in operations:
        other = again[one.index] if one.index < len(again) else None
        if other is None or other.identity != one.identity or other.arguments != one.arguments:
            return False
        pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
        if any(ours.digest != theirs.digest for ours, theirs in pairs):
            return False
    return True


def _element(scratch: Path, rank: int, difference: OperationDifference) -> ElementDifference | None:
    if difference.place is None or difference.shown is None:
        return None
    tensors = []
    for name, operation in zip(("reference", "candidate"), difference.shown, strict=True):
        path = scratch / f"{name}-second pass" / f"tensors-{rank}.pt"
        tensors.append(torch.load(path, weights_only=True)[operation.index][difference.side][difference.place])
    if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
        return None
    arrays: list[np.ndarray] = [array_of(tensor) for tensor in tensors]
    return element_difference(*arrays, dtype=str(tensors[0].dtype).removeprefix("torch."))


def _tensor(scratch: Path, rank: int, difference: OperationDifference) -> str:
    if difference.kind in (DATA, STATE_BEFORE, STATE_AFTER):
        return "" if difference.place is None else difference.candidate.outputs[difference.place].name
    sides = ("candidate", "reference") if difference.candidate is not None else ("reference", "candidate")
    logs = [read_log(scratch / f"{side}-first pass" / f"operations-{rank}.jsonl") for side in sides]
    return concerned_tensor(difference, *logs)


def _sample(log: list[Operation], difference: OperationDifference, element: ElementDifference | None) -> int | None:
    """The sample of the differing element, if its tensor has as many rows as the micro-batch has samples."""
    if element is None or not element.index:
        return None
    here = difference.shown[0]
    if here.phase not in ("begin", "forward", "backward"):
        return None
    batches = [each for each in log if each.name == BATCH and each.micro_batch == here.micro_batch]
    samples = batches[0].samples if batches else None
    value = getattr(here, difference.side)[difference.place]
    if (
        not samples
        or not value.shape
        or value.shape[0] != len(samples)
        or value.name.startswith(("weights", "buffers"))
    ):
        return None
    return samples[element.index[0]]
