"""bisect --replay: the first module and operation inside the step, in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from det_lightning.bisection.operation_log import Operation
from det_lightning.bisection.operations import (
    ARGUMENT,
    CODE,
    CONSTANT,
    DATA,
    INPUT,
    OPERATION,
    STATE_AFTER,
    STATE_BEFORE,
    OperationDifference,
)  # fmt: skip
from det_lightning.cli.printing import say, say_table, visible

_WHAT = {
    OPERATION: "equal inputs gave unequal results: look at the library, the kernel, the processor and random state",
    ARGUMENT: "the operation was given another number",
    INPUT: "it read a tensor that no recorded operation made different",
    CODE: "the two runs execute different operations from here on",
    DATA: "the batch differs before any module has run: look at the data, its augmentation and its order",
    STATE_BEFORE: "the state before the step differs in something that the ledger does not record, as on a rank above 0: "
    "an earlier step made it so, and ReplicaGuard stops at the one where the ranks' copies drift apart",
    STATE_AFTER: "the state after the step differs, though no recorded operation made it different",
}
_RANDOM = ("bernoulli", "native_dropout", "uniform", "normal", "rand", "multinomial", "poisson", "exponential")


def meaning(difference: OperationDifference) -> str:
    """What the kind of difference says about where to look."""
    one = difference.reference or difference.candidate
    if difference.kind == INPUT and one.name == CONSTANT:
        return "the program computes with another constant: look at hyperparameters and at the code in this place"
    if difference.kind == INPUT and difference.origin is not None and difference.origin[0] != difference.origin[1]:
        return "the two runs read different tensors in this place: look at where each of them comes from"
    if difference.kind == OPERATION and any(word in one.name for word in _RANDOM):
        return "it draws random numbers, and drew others: look at the seed and at what draws before it"
    return _WHAT[difference.kind]


def say_finding(finding: Any) -> None:
    """finding: a replay.step_search.StepFinding."""
    difference = finding.difference
    if difference is None:
        say(f"replay: {finding.verdict}: {visible(finding.reason)}")
        return
    one = difference.reference or difference.candidate
    say(
        f"replay: {one.phase}, operation {difference.index} of rank {finding.rank} is the first that differs; "
        "a second replay of both sides agrees"
    )
    rows = finding_rows(finding)
    say_table([[head, one, other if other != one else ""] for head, one, other in rows])
    _say_element(finding)
    say(meaning(difference))


def finding_rows(finding: Any) -> list[list[str]]:
    """[what, on the reference's side, on the candidate's side] of an operation that was found."""
    difference = finding.difference
    one = difference.reference or difference.candidate
    rows = []
    if one.phase in ("forward", "backward"):
        rows.append(["module", *_both(difference, lambda each: visible(each.module) or "(the LightningModule itself)")])
    rows.append(["operation", *_both(difference, name_of)])
    if any(each is not None and each.place for each in (difference.reference, difference.candidate)):
        rows.append(["called in", *_both(difference, lambda each: visible(each.place) or "-")])
    if difference.argument is not None:
        rows.append(["argument", *_both(difference, lambda each: visible(each.arguments[difference.argument]))])
    if difference.origin is not None:
        rows.append(["reads", *(visible(each) for each in difference.origin)])
    if (
        difference.shown is not None
        and (forms := [_form(difference, each) for each in difference.shown])[0] != forms[1]
    ):
        rows.append(["form", *forms])
    if finding.tensor:
        rows.append(["works on", visible(finding.tensor), visible(finding.tensor)])
    return rows


def _form(difference: OperationDifference, operation: Operation) -> str:
    """Type and shape of the tensor that differs; without one, of all that a batch holds."""
    values = getattr(operation, difference.side) if difference.side else ()
    if difference.place is not None:
        return f"{values[difference.place].dtype} {list(values[difference.place].shape)}"
    return ", ".join(f"{visible(each.name)} {each.dtype} {list(each.shape)}" for each in values)


def name_of(operation: Operation) -> str:
    """The operation in words."""
    if operation.name == CONSTANT:
        return "a constant (aten.lift_fresh)"
    if operation.phase != "backward" or not operation.node:
        return visible(operation.name)
    of = "" if operation.forward is None else f", backward of operation {operation.forward}"
    return f"{visible(operation.name)} in {visible(operation.node)}{of}"


def tensor_of(difference: OperationDifference) -> str:
    """Which tensor is shown, in words; empty if none is."""
    if difference.shown is None or difference.place is None:
        return ""
    shown = difference.shown[0]
    value = getattr(shown, difference.side)[difference.place]
    what = "result" if difference.side == "outputs" else "input"
    where = f"{what} {difference.place}" if not value.name else f"{what} {visible(value.name)}"
    if difference.kind == CODE:
        where += f" of operation {shown.index}, {visible(shown.name)}, the next that both run"
    return f"{where}: {value.dtype} {list(value.shape)}"


def _say_element(finding: Any) -> None:
    element = finding.element
    if element is None:
        return
    say(f"  {tensor_of(finding.difference)}, {element.count} of {element.size} elements differ, the first at")
    index = ", ".join(map(str, element.index))
    sample = "" if finding.sample is None else f"sample {finding.sample} of the data set"
    distance = "" if element.ulps is None else f"{element.ulps} ulps apart"
    rows = [
        [f"[{index}]", "reference", f"0x{element.reference_bits}", element.reference, sample],
        ["", "candidate", f"0x{element.candidate_bits}", element.candidate, distance],
    ]
    say_table([row if sample or distance else row[:-1] for row in rows])


def finding_json(finding: Any) -> dict[str, Any]:
    """Everything but the operations before it."""
    difference = finding.difference
    told = None
    if difference is not None:
        told = asdict(difference) | {"index": difference.index, "meaning": meaning(difference)}
    return {
        "verdict": finding.verdict,
        "reason": finding.reason,
        "rank": finding.rank,
        "difference": told,
        "element": None if finding.element is None else asdict(finding.element),
        "tensor": finding.tensor,
        "sample": finding.sample,
    }


def _both(difference: OperationDifference, text: Any) -> list[str]:
    return ["-" if each is None else text(each) for each in (difference.reference, difference.candidate)]
