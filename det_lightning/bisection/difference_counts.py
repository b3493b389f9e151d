"""Counts, over all steps that two ledgers hold, how much differs: `det-lightning diff`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import KINDS, Record


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
    """steps: how many both ledgers hold; steps_differ: how many of these differ in a field or a root that
    both recorded.

    kinds: one entry for each kind of state that both recorded at least once. fields: name -> steps at which
    it differs.
    """

    steps: int
    steps_differ: int
    kinds: tuple[KindCount, ...]
    fields: dict[str, int]


def count_differences(
    reference: LedgerReader,
    candidate: LedgerReader,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DifferenceCounts:
    """Read both ledgers from the first common step to the last. progress: called with (steps read, steps in
    all).
    """
    kinds = {kind: KindCount(kind) for kind in KINDS}
    fields: dict[str, int] = {}
    steps = steps_differ = 0
    start = max(reference.first_step or 0, candidate.first_step or 0)
    stop = min(reference.last_step or 0, candidate.last_step or 0)
    ours = (record for record in reference.records() if record.step >= start)
    theirs = (record for record in candidate.records() if record.step >= start)
    for one, other in zip(ours, theirs, strict=False):
        steps += 1
        if progress is not None and steps % 256 == 0:
            progress(steps, stop - start + 1)
        names = [name for name in one.agree.keys() & other.agree.keys() if name != "roots"]
        differing = [name for name in names if _differ(one.agree[name], other.agree[name])]
        for name in differing:
            fields[name] = fields.get(name, 0) + 1
        differing += [kind for kind in KINDS if _count_kind(kinds[kind], reference, one, candidate, other)]
        steps_differ += bool(differing)
    return DifferenceCounts(steps, steps_differ, tuple(each for each in kinds.values() if each.steps), fields)


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
