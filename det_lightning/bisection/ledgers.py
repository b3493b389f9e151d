"""Compares two ledgers: headers, then the first step whose trace differs, then what differs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from det_lightning.bisection.search import DIVERGE, MATCH, UNKNOWN, Verdict, first_divergent
from det_lightning.ledger.compare import Difference, HeaderDifference, difference_at, header_differences
from det_lightning.ledger.reader import LedgerReader

__all__ = ["Comparison", "Difference", "compare_ledgers"]


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing two ledgers.

    verdict, reason: MATCH, DIVERGE or UNKNOWN, and one sentence that says why.
    headers: differences of the headers, recipe first. first_common, last_common: the steps that both hold,
    None if none.
    first: the first divergent step, only for DIVERGE.
    """

    verdict: Verdict
    reason: str
    headers: tuple[HeaderDifference, ...]
    first_common: int | None
    last_common: int | None
    first: Difference | None


def compare_ledgers(
    reference: LedgerReader,
    candidate: LedgerReader,
    *,
    recipe_may_differ: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Find the first step at which `candidate` is another run than `reference`.

    Equal traces prove equal steps up to there, so a few lines of each file are read. Only where traces cannot
    decide (one run recorded what the other did not, or started later without saying from which record) are
    all steps read, reported to `progress` as (steps read, steps in all). Raises LedgerError if a line that is
    needed is damaged.
    """
    headers = header_differences(reference, candidate)

    def comparison(verdict: Verdict, reason: str, first: Difference | None = None) -> Comparison:
        return Comparison(verdict, reason, headers, start, stop, first)

    start, stop = _common_steps(reference, candidate)
    recipe = [each.name for each in headers if each.part == "recipe"]
    if recipe and not recipe_may_differ:
        names = ", ".join(recipe[:5]) + (", ..." if len(recipe) > 5 else "")
        return comparison(UNKNOWN, f"the recipes differ ({names}), so the runs were not meant to be equal")
    if start is None:
        return comparison(UNKNOWN, "the ledgers have no step in common")

    def probe(place: int) -> Verdict:
        step = start + place
        return MATCH if reference.record(step).trace == candidate.record(step).trace else DIVERGE

    result = first_divergent(stop - start + 1, probe)
    if result.verdict is UNKNOWN:
        return comparison(
            UNKNOWN, "a later trace agrees where an earlier one differs; run verify --chain on both ledgers"
        )
    if result.verdict is MATCH:
        return comparison(MATCH, f"the runs agree on all steps that both ledgers hold, {start} to {stop}")
    step = start + result.first_diverge
    difference = difference_at(reference, candidate, step, last_match=step - 1 if step > start else None)
    if difference.found:
        return comparison(DIVERGE, f"the runs diverge at step {step}", difference)
    recorded_alike = not difference.fields and not difference.roots
    if recorded_alike and step == start and _traces_have_one_start(reference, candidate):
        return comparison(
            DIVERGE, f"the runs diverged before step {step}, the first that both ledgers hold", difference
        )
    return _without_traces(reference, candidate, step, stop, comparison, progress)


def _without_traces(reference, candidate, start, stop, comparison, progress) -> Comparison:
    """Read every step from `start` to `stop` for a difference in what both ledgers recorded; finding none
    proves nothing.
    """
    one_sided: set[str] = set()
    for step in range(start, stop + 1):
        if progress is not None:
            progress(step - start, stop - start + 1)
        difference = difference_at(reference, candidate, step, last_match=step - 1 if step > start else None)
        if difference.found:
            return comparison(DIVERGE, f"the runs diverge at step {step}", difference)
        one_sided |= {each.name for each in (*difference.fields, *difference.roots)}
    why = (
        f"only one ledger recorded {', '.join(sorted(one_sided))}"
        if one_sided
        else "the later ledger does not say from which record it continues"
    )
    return comparison(UNKNOWN, f"all that both ledgers recorded agrees, steps {start} to {stop}, but {why}")


def _common_steps(reference: LedgerReader, candidate: LedgerReader) -> tuple[int | None, int | None]:
    if reference.first_step is None or candidate.first_step is None:
        return None, None
    start = max(reference.first_step, candidate.first_step)
    stop = min(reference.last_step, candidate.last_step)
    return (start, stop) if start <= stop else (None, None)


def _traces_have_one_start(reference: LedgerReader, candidate: LedgerReader) -> bool:
    """Whether the traces of two runs that are equal would be equal: both start at one step, or the later one
    names its start.
    """
    if reference.first_step == candidate.first_step:
        return (reference.resumed_from is None) == (candidate.resumed_from is None)
    later = max(reference, candidate, key=lambda reader: reader.first_step)
    return later.resumed_from is not None
