"""What a report shows, gathered from two ledgers without reading all of either."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from det_lightning.bisection.ledgers import Comparison
from det_lightning.bisection.search import thinned
from det_lightning.errors import LedgerError
from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import KINDS, LEAF_BYTES, bits_float

MATCH, DIVERGE, UNKNOWN = "match", "diverge", "unknown"
MOST_POINTS = 600
MOST_COLUMNS = 160
MOST_ROWS = 40  # of one kind


@dataclass(frozen=True)
class LossCurve:
    """steps and losses of one run, thinned out to MOST_POINTS; a loss is None where none was recorded."""

    steps: tuple[int, ...]
    losses: tuple[float | None, ...]


@dataclass(frozen=True)
class MapRow:
    """One tensor over the steps of a map: MATCH, DIVERGE or UNKNOWN (not recorded on both sides) for each."""

    kind: str
    name: str
    states: tuple[str, ...]


@dataclass(frozen=True)
class TensorMap:
    """steps: the columns. rows: by kind, those that diverge first on top. left_out: kind -> rows that are not shown."""

    steps: tuple[int, ...]
    rows: tuple[MapRow, ...]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Report:
    """curves: reference and candidate. finding: a StepFinding, or None without a replay."""

    reference: LedgerReader
    candidate: LedgerReader
    comparison: Comparison
    finding: Any
    curves: tuple[LossCurve, LossCurve]
    map: TensorMap


def gather(reference: LedgerReader, candidate: LedgerReader, comparison: Comparison, finding: Any = None) -> Report:
    """Read what the pictures need. Raises LedgerError if a line that is needed is damaged."""
    marked = [] if comparison.first is None else [comparison.first.step - 1, comparison.first.step]
    return Report(
        reference,
        candidate,
        comparison,
        finding,
        (loss_curve(reference, marked), loss_curve(candidate, marked)),
        tensor_map(reference, candidate, comparison, marked),
    )


def loss_curve(reader: LedgerReader, marked: Sequence[int] = ()) -> LossCurve:
    if reader.first_step is None:
        return LossCurve((), ())
    steps = thinned(reader.first_step, reader.last_step, MOST_POINTS, marked)
    return LossCurve(tuple(steps), tuple(_loss(reader.record(step).agree.get("loss")) for step in steps))


def _loss(bits: Any) -> float | None:
    try:
        value = bits_float(bits) if isinstance(bits, str) else None
    except LedgerError:
        return None
    return None if value is None or math.isinf(value) else value


def tensor_map(
    reference: LedgerReader, candidate: LedgerReader, comparison: Comparison, marked: Sequence[int] = ()
) -> TensorMap:
    """Which tensor agrees at which step that both ledgers hold."""
    if comparison.first_common is None:
        return TensorMap((), (), {})
    steps = thinned(comparison.first_common, comparison.last_common, MOST_COLUMNS, marked)
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for step in steps:
        for kind, name, state in _states(reference, candidate, step):
            cells.setdefault((kind, name), {})[step] = state
    rows, left_out = [], {}
    for kind in KINDS:
        found = [
            MapRow(kind, name, tuple(states.get(step, UNKNOWN) for step in steps))
            for (of, name), states in cells.items()
            if of == kind
        ]
        found.sort(key=lambda row: (row.states.index(DIVERGE) if DIVERGE in row.states else len(steps), row.name))
        rows += found[:MOST_ROWS]
        if len(found) > MOST_ROWS:
            left_out[kind] = len(found) - MOST_ROWS
    return TensorMap(tuple(steps), tuple(rows), left_out)


def _states(reference: LedgerReader, candidate: LedgerReader, step: int) -> Iterator[tuple[str, str, str]]:
    """(kind, tensor, state) at one step; a kind whose leaves were not kept stands as one row."""
    ours, theirs = reference.record(step), candidate.record(step)
    for kind in KINDS:
        roots = ours.agree["roots"].get(kind), theirs.agree["roots"].get(kind)
        names, row = reference.row(ours, kind)
        other_names, other = candidate.row(theirs, kind)
        if None in roots:
            continue
        if names and names == other_names:
            for i, name in enumerate(names):
                place = slice(LEAF_BYTES * i, LEAF_BYTES * (i + 1))
                yield kind, name, MATCH if row[place] == other[place] else DIVERGE
        elif names and other_names:
            digests = [
                {name: row_[LEAF_BYTES * i : LEAF_BYTES * (i + 1)] for i, name in enumerate(of)}
                for of, row_ in ((names, row), (other_names, other))
            ]
            for name in sorted(digests[0].keys() | digests[1].keys()):
                yield kind, name, MATCH if digests[0].get(name) == digests[1].get(name) else DIVERGE
        elif reference.keeps_leaves(ours, kind) and candidate.keeps_leaves(theirs, kind):
            continue
        else:
            yield kind, f"(all {kind})", MATCH if roots[0] == roots[1] else DIVERGE
