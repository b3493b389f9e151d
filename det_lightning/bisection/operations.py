"""The first operation in which two runs of one step differ: a pure comparison of two operation logs.

An operation that differs because an earlier one did is a consequence. A difference that reaches nothing (a logged time,
say) is passed over where a later one with a cause of its own does reach the state after the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from det_lightning.bisection.alignment import aligned
from det_lightning.bisection.operation_log import BATCH, GRADIENTS, NOT_READ, PENDING, STATE, Operation, Value

OPERATION, ARGUMENT, INPUT, CODE, DATA, STATE_BEFORE, STATE_AFTER = (
    "operation", "argument", "input", "code", "data", "state before", "state after",
)  # fmt: skip
_OF_ITS_OWN = (OPERATION, ARGUMENT, CODE, DATA, STATE_BEFORE)
_LOOK_AHEAD = 40
_NOWHERE = "that no recorded operation made"
CONSTANT = "aten.lift_fresh"  # how torch.tensor(number) shows


@dataclass(frozen=True)
class OperationDifference:
    """How two runs of a step part.

    kind: OPERATION, equal inputs and unequal outputs; ARGUMENT, another number was given; INPUT, a tensor was read that
    no recorded operation made different; CODE, other operations ran; DATA, the batch differs; STATE_BEFORE, STATE_AFTER.
    reference, candidate: the operation on each side; None where one side has none.
    side, place: which tensor of `shown` differs, as ("outputs" or "inputs", number); None if there is none.
    shown: the pair of operations to look at: these two, or for CODE the next ones that both sides ran and that were
    given another tensor. argument: number of the differing argument, else None. origin: where each side's tensor came
    from, for INPUT.
    """

    kind: str
    reference: Operation | None
    candidate: Operation | None
    side: str | None = None
    place: int | None = None
    argument: int | None = None
    origin: tuple[str, str] | None = None
    shown: tuple[Operation, Operation] | None = None

    @property
    def index(self) -> int:
        return min(each.index for each in (self.reference, self.candidate) if each is not None)


def first_operation(reference: Sequence[Operation], candidate: Sequence[Operation]) -> OperationDifference | None:
    """The first difference with a cause of its own, None if all operations agree."""
    found: list[OperationDifference] = []
    values = [digests_in(log) for log in (reference, candidate)]
    explained: set[str] = set()  # digests on the candidate's side that an earlier difference made
    touched: set[int] = set()  # storages such values were written to
    goes_on = False  # other code that was found already: it is one difference, told by its first operation
    stretches: list[
        set[int]
    ] = []  # of each that was found: the indices of the candidate's operations that belong to it
    for one, other in aligned(reference, candidate):
        if one is not None and other is not None and one.identity == other.identity:
            found, goes_on = [_with_effect(each, one, other) for each in found], False
        difference = _difference(one, other, explained, touched, reference, candidate)
        if difference is not None and difference.kind == CODE and _makes_nothing_new(one, other, *values):
            continue
        if (
            difference is not None
            and difference.kind == DATA
            and found
            and _is_fetch_of(found[0], other, candidate, values[0])
        ):
            return difference
        if difference is not None and not (difference.kind == CODE and goes_on):
            found.append(difference)
            stretches.append(set())
            goes_on = difference.kind == CODE
        if goes_on and other is not None:
            stretches[-1].add(other.index)
        if difference is None or difference.kind != CODE:
            _taint(one, other, explained, touched, values[0])
        elif other is not None:
            explained |= _telling(other.outputs, values[0])
            touched |= {each.storage for each in other.outputs} - {0}  # 0: no memory
    if len(found) < 2 or reaches(found[0], candidate, values[0], also=stretches[0]):
        return found[0] if found else None
    pairs = zip(found, stretches, strict=True)
    reaching = [each for each, stretch in pairs if reaches(each, candidate, values[0], also=stretch)]
    return next((each for each in reaching if _has_its_own_cause(each)), (reaching or found)[0])


def digests_in(log: Sequence[Operation]) -> set[str]:
    """Of all values that the operations of a log read and made."""
    return {value.digest for each in log for value in (*each.inputs, *each.outputs)}


def _telling(values: Iterable[Value], ours: set[str]) -> set[str]:
    """The digests by which a value is known again: not of single numbers that the reference has too (`ours`), since a one or
    a zero may come from anywhere."""
    return {
        each.digest
        for each in values
        if each.digest not in NOT_READ and (prod(each.shape) > 1 or each.digest not in ours)
    }


def _makes_nothing_new(one: Operation | None, other: Operation | None, ours: set[str], theirs: set[str]) -> bool:
    """Whether all that only one side ran gave values that the other side has too, such as one more view."""
    sides = ((one, theirs), (other, ours))
    return all(
        each.digest in values and each.digest not in NOT_READ
        for operation, values in sides
        for each in (operation.outputs if operation else ())
    )


def _has_its_own_cause(difference: OperationDifference) -> bool:
    """Not for a tensor from nowhere: it may be the consequence of an earlier difference by a way that is not recorded."""
    if difference.kind != INPUT:
        return difference.kind in _OF_ITS_OWN
    known = difference.origin is not None and not any(each.endswith(_NOWHERE) for each in difference.origin)
    return known or difference.reference.name == CONSTANT


def _is_fetch_of(first: OperationDifference, batch: Operation, candidate: Sequence[Operation], ours: set[str]) -> bool:
    """Whether a tensor from nowhere is what a data set holds, read for this batch: a step's later micro-batches are fetched
    while it is recorded."""
    return first.kind == INPUT and not _has_its_own_cause(first) and reaches(first, candidate, ours, batch)


def _with_effect(difference: OperationDifference, one: Operation, other: Operation) -> OperationDifference:
    if difference.kind != CODE or difference.shown is not None:
        return difference
    for side in ("inputs", "outputs"):
        for place, (ours, theirs) in enumerate(zip(getattr(one, side), getattr(other, side), strict=False)):
            if _differ(ours, theirs) and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape):
                return replace(difference, shown=(one, other), side=side, place=place)
    return difference


def _difference(one, other, explained, touched, reference, candidate) -> OperationDifference | None:
    if one is None or other is None or one.identity != other.identity:
        return OperationDifference(CODE, one, other)
    if one.name == BATCH and [each.name for each in one.outputs] != [each.name for each in other.outputs]:
        return OperationDifference(DATA, one, other, "outputs", shown=(one, other))
    outputs = [place for place, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)) if _differ(a, b)]
    if one.name in (STATE, BATCH):
        kind = DATA if one.name == BATCH else STATE_BEFORE if one.phase == "begin" else STATE_AFTER
        for place in outputs:
            if kind != STATE_AFTER or not _known(other.outputs[place], explained, touched):
                return OperationDifference(kind, one, other, "outputs", place, shown=(one, other))
        return None
    inputs = [place for place, (a, b) in enumerate(zip(one.inputs, other.inputs, strict=False)) if _differ(a, b)]
    unknown = [place for place in inputs if not _known(other.inputs[place], explained, touched)]
    spelled = [place for place, (a, b) in enumerate(zip(one.arguments, other.arguments, strict=False)) if a != b]
    if spelled and not inputs and not one.arguments[spelled[0]].startswith("gives "):
        place = outputs[0] if outputs else None
        return OperationDifference(ARGUMENT, one, other, "outputs", place, spelled[0], shown=(one, other))
    if unknown:
        origin = (
            origin_of(one.inputs[unknown[0]], reference, one.index),
            origin_of(other.inputs[unknown[0]], candidate, other.index),
        )
        return OperationDifference(INPUT, one, other, "inputs", unknown[0], origin=origin, shown=(one, other))
    if outputs and not inputs:
        if one.inputs or one.name.startswith("aten."):
            return OperationDifference(OPERATION, one, other, "outputs", outputs[0], shown=(one, other))
        if not any(_known(other.outputs[place], explained, touched) for place in outputs):
            return OperationDifference(INPUT, one, other, "outputs", outputs[0], shown=(one, other))
    return None


def _differ(one: Value, other: Value) -> bool:
    return (one.digest, one.shape, one.dtype) != (other.digest, other.shape, other.dtype)


def _known(value: Value, explained: set[str], touched: set[int]) -> bool:
    return value.digest in explained or value.storage in touched


def _taint(
    one: Operation | None, other: Operation | None, explained: set[str], touched: set[int], ours: set[str]
) -> None:
    if other is None or other.name == STATE:
        return
    pending = any(each.digest == PENDING for each in other.outputs)
    known = any(_known(each, explained, touched) for each in other.inputs)
    for place, made in enumerate(other.outputs):
        before = one.outputs[place : place + 1] if one is not None else ()
        if (one is not None and (not before or _differ(before[0], made))) or (pending and known):
            explained |= _telling([made], ours)
            touched |= {made.storage} - {0}
        elif made.storage not in {each.storage for each in other.inputs}:
            touched.discard(made.storage)  # memory that was freed and used again


def reaches(
    difference: OperationDifference,
    candidate: Sequence[Operation],
    ours: set[str],
    end: Operation | None = None,
    *,
    also: Collection[int] = (),
) -> bool:
    """Whether what differs may have had an effect on the state after the step, or on the note `end`. ours: `digests_in` the
    reference's log. also: indices of other operations of the candidate that belong to the difference."""
    start = difference.candidate
    if start is None or difference.kind in (STATE_BEFORE, STATE_AFTER):
        return True
    changed = start.outputs
    if difference.reference is not None and difference.reference.identity == start.identity:
        before = difference.reference.outputs
        changed = [b for place, b in enumerate(start.outputs) if place >= len(before) or _differ(before[place], b)]
    tainted, storages = _telling(changed, ours), {each.storage for each in changed} - {0}  # 0: no memory
    for operation in candidate[start.index + 1 :]:
        if operation is end or (end is None and operation.name == STATE):
            return any(each.digest in tainted or each.storage in storages for each in operation.outputs)
        hit = any(each.digest in tainted or each.storage in storages for each in operation.inputs)
        if hit or operation.index in also:
            tainted |= _telling(operation.outputs, ours)
            storages |= {each.storage for each in operation.outputs} - {0}
        elif operation.name not in (BATCH, GRADIENTS):  # which note what lies in a memory, and make nothing there
            fresh = {each.storage for each in operation.outputs} - {each.storage for each in operation.inputs}
            storages -= fresh
    return False


def concerned_tensor(difference: OperationDifference, log: Sequence[Operation], other_log: Sequence[Operation]) -> str:
    """Name of the state or gradient that the operation works on, or that one soon after it makes of its results; empty if
    there is none. An operation that only follows it is asked nothing: what that works on may be innocent. So may be what
    comes of its results with the values that the other side has too.

    log: of the candidate, or of the reference where the candidate has no such operation; other_log: of the other side.
    """
    one = difference.candidate or difference.reference
    if difference.kind == INPUT:
        for each in (difference.candidate, difference.reference):
            if name := getattr(each, difference.side)[difference.place].name:
                return name
    digests, storages, gradient = set(), set(), ""
    innocent = digests_in(other_log) - {*NOT_READ}
    shown = difference.shown and difference.shown[difference.candidate is not None]  # this log's
    for operation in (one, *([shown] if shown else []), *log[one.index + 1 : one.index + _LOOK_AHEAD]):
        noted = operation.name in (STATE, BATCH, GRADIENTS)
        read = operation.outputs if noted else operation.inputs
        follows = [each for each in read if each.digest in digests]
        follows = follows or [each for each in read if each.storage in storages]  # gradients may share one memory
        if noted:
            follows = [each for each in follows if each.digest not in innocent]
        made = {each.storage for each in operation.outputs}
        if not follows and operation is not one and operation is not shown:
            storages -= made  # memory that was freed and used again
            continue
        names = [each.name for each in (follows if noted else (*operation.outputs, *read)) if each.name]
        state = next((name for name in names if not name.startswith(GRADIENTS)), "")
        gradient = gradient or next(iter(names), "")
        if state or (gradient and (noted or operation is one)):
            return state or gradient
        if operation is one or any(each.digest not in innocent for each in operation.outputs):
            digests |= {each.digest for each in operation.outputs} - innocent - {*NOT_READ}
            storages |= made - {0}  # 0: no memory
    return gradient


def origin_of(value: Value, log: Sequence[Operation], before: int) -> str:
    """Where a tensor with this digest was last seen before operation number `before`, in words."""
    if log[before].name == CONSTANT:
        return "a constant of the program"
    for operation in reversed(log[:before]):
        for made in operation.outputs:
            if made.digest == value.digest:
                if operation.name in (STATE, BATCH):
                    when = " before the step" if operation.phase == "begin" else ""
                    return f"{made.name}{when}"
                named = f" ({made.name})" if made.name else ""
                return f"what operation {operation.index}, {operation.name}, gave{named}"
    return f"{value.name or 'a tensor'} {_NOWHERE}"
