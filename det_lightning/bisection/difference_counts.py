"""Counts, over all steps that two ledgers hold, how much differs: `det-lightning diff`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from det_lightning.bisection.search import DIVERGE, MATCH, Verdict, first_divergent, thinned
from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import KINDS, Record

MOST_STEPS = 1000


@dataclass
class KindCount:
    """How much of one kind of state differs, among the steps at which both runs recorded it.

    steps_differ: steps whose roots differ. tensors_differ: tensors that differ at one of these steps at
    least.
    """

    kind: str
    steps: int = 0
    steps_differ: int = 0
    tensors: set[str] = field(default_factory=set)
    tensors_differ: set[str] = field(default_factory=set)


@dataclass
class DifferenceCounts:
    """steps: how many both ledgers hold; looked_at: of these, how many were read; steps_differ: how many of those
    differ in a field or a root that both recorded.

    first: the first step whose trace differs, None if none does or traces cannot tell.
    kinds: one entry for each kind of state that both recorded at least once. fields: name -> steps at which
    it differs.
    """

    steps: int
    looked_at: int
    steps_differ: int
    first: int | None
    kinds: tuple[KindCount, ...]
    fields: dict[str, int]


def count_differences(
    reference: LedgerReader,
    candidate: LedgerReader,
    *,
    most_steps: int | None = MOST_STEPS,
    progress: Callable[[int, int], None] | None = None,
) -> DifferenceCounts:
    """Compare the steps that both ledgers hold: all of them, or, if they are more than `most_steps`, that many evenly
    spread ones and the first whose trace differs. progress: called with (steps read, steps in all).
    """
    kinds = {kind: KindCount(kind) for kind in KINDS}
    fields: dict[str, int] = {}
    looked_at = steps_differ = 0
    start = max(reference.first_step or 0, candidate.first_step or 0)
    stop = min(reference.last_step or 0, candidate.last_step or 0)
    steps = 0 if None in (reference.first_step, candidate.first_step) else max(0, stop - start + 1)
    first = first_unlike_trace(reference, candidate, start, stop) if steps else None
    if most_steps is None or steps <= most_steps:
        ours = (record for record in reference.records() if record.step >= start)
        pairs = zip(ours, (record for record in candidate.records() if record.step >= start), strict=False)
        total = steps
    else:
        chosen = thinned(start, stop, most_steps, [] if first is None else [first - 1, first])
        pairs = ((reference.record(step), candidate.record(step)) for step in chosen)
        total = len(chosen)
    for one, other in pairs:
        looked_at += 1
        if progress is not None and looked_at % 256 == 0:
            progress(looked_at, total)
        names = [name for name in one.agree.keys() & other.agree.keys() if name != "roots"]
        differing = [name for name in names if _differ(one.agree[name], other.agree[name])]
        for name in differing:
            fields[name] = fields.get(name, 0) + 1
        differing += [kind for kind in KINDS if _count_kind(kinds[kind], reference, one, candidate, other)]
        steps_differ += bool(differing)
    counted = tuple(each for each in kinds.values() if each.steps)
    return DifferenceCounts(steps, looked_at, steps_differ, first, counted, fields)


def first_unlike_trace(reference: LedgerReader, candidate: LedgerReader, start: int, stop: int) -> int | None:
    """The first step of start .. stop whose traces differ, by binary search; None if none does or they are in no order."""

    def probe(place: int) -> Verdict:
        step = start + place
        return MATCH if reference.record(step).trace == candidate.record(step).trace else DIVERGE

    found = first_divergent(stop - start + 1, probe)
    return start + found.first_diverge if found.verdict is DIVERGE else None


def _differ(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other


def _count_kind(count: KindCount, reference: LedgerReader, one: Record, candidate: LedgerReader, other: Record) -> bool:
    """Count one step; whether the roots of this kind differ there."""
    roots = [record.agree["roots"].get(count.kind) for record in (one, other)]
    if None in roots:
        return False
    count.steps += 1
    if count.steps == 1:
        count.tensors.update(reference.row(one, count.kind)[0])
    if roots[0] == roots[1]:
        return False
    count.steps_differ += 1
    ours, theirs = reference.leaves(one, count.kind), candidate.leaves(other, count.kind)
    count.tensors.update(ours, theirs)
    if ours and theirs:
        count.tensors_differ.update(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return True
