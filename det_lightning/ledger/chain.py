"""Checks every byte of a ledger that can be checked, from the first line to the last: `verify --chain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.leaf_file import LeafFile, leaf_bytes, leaf_files, leaf_path, open_leaves
from det_lightning.ledger.line_file import LineFile
from det_lightning.ledger.lines import (
    FIRST_CHAIN,
    FORMAT,
    LEDGER_FILE,
    chain_of,
    decode_line,
    layout_names,
    record_of,
    start_trace,
)
from det_lightning.ledger.record import (
    FIRST_TRACE,
    LEAF_BYTES,
    LeafPlace,
    Record,
    next_trace,
    root_of_row,
    root_prefixes,
)


@dataclass(frozen=True)
class Damage:
    """The first place where a ledger is not what its writer wrote.

    line: counted from 1, the header. step: of the record there, or of the next one due; None if not known.
    """

    line: int
    step: int | None
    what: str


@dataclass(frozen=True)
class ChainReport:
    """What `verify_chain` found. Sound means: no damage; torn bytes alone are the mark of a killed process,
    not damage.

    lines, records, superseded: whole lines read, records that count, records that a seam went back behind (up
    to the damage, if any).
    without_leaves: of how many records the leaves were dropped, as a line says; only their roots were read.
    torn_bytes: bytes after the last line end. torn_leaf_bytes: kind -> bytes of leaves that no record names,
    at the file's end.
    """

    lines: int
    records: int
    superseded: int
    without_leaves: int
    first_step: int | None
    last_step: int | None
    closed: bool
    torn_bytes: int
    torn_leaf_bytes: dict[str, int]
    damage: Damage | None

    @property
    def sound(self) -> bool:
        return self.damage is None

    @property
    def torn(self) -> bool:
        return bool(self.torn_bytes or self.torn_leaf_bytes)


def verify_chain(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> ChainReport:
    """Walk the ledger in directory `path`: chain, seals, steps, traces, layouts, roots against leaves,
    closing count.

    progress: called now and then with (bytes read, bytes in all). Raises LedgerError only if a file cannot be
    read at all.
    """
    directory = Path(path)
    lines = LineFile(directory / LEDGER_FILE)
    walk = _Walk(directory)
    damage, number, start = None, 0, 0
    try:
        for number, (start, line) in enumerate(lines.lines(), start=1):
            walk.line(start, line)
            if progress is not None and number % 256 == 0:
                progress(start, lines.end)
        if number == 0:
            raise LedgerError("there is no whole line, not even a header")
        if walk.missing_leaves() is not None:
            walk.dropped |= _dropped_after(lines)
        if (missing := walk.missing_leaves()) is not None:
            number, walk.step_at_line, what = missing
            raise LedgerError(what)
    except LedgerError as error:
        damage = Damage(line=max(number, 1), step=walk.step_at_line, what=str(error))
    finally:
        lines.close()
        walk.close()
    torn_leaves = {}
    if damage is None:
        torn_leaves = walk.torn_leaves()
    return ChainReport(
        lines=number if damage is None else number - 1,
        records=walk.records,
        superseded=walk.superseded,
        without_leaves=walk.without_leaves,
        first_step=walk.first_step,
        last_step=walk.last_step if walk.records else None,
        closed=walk.closed,
        torn_bytes=lines.torn_bytes,
        torn_leaf_bytes=torn_leaves,
        damage=damage,
    )


def _dropped_after(seen: LineFile) -> set[int]:
    """Parts that were dropped by lines that were written since `seen` was opened: the run goes on while it is checked."""
    now = LineFile(seen.path)
    try:
        bodies = [decode_line(line) for _, line in now.lines(seen.end)]
    finally:
        now.close()
    return {body["part"] for body in bodies if body["kind"] == "dropped"}


@dataclass
class _Walk:
    """What must hold of the next line, given all lines before it."""

    directory: Path
    chain: str = FIRST_CHAIN
    trace: str = FIRST_TRACE
    first_step: int | None = None
    last_step: int | None = None
    step_at_line: int | None = None
    superseded: int = 0
    without_leaves: int = 0
    segment: int | None = None
    closed: bool = False
    lines: int = 0
    ends: dict[tuple[str, int | None], int] = field(default_factory=dict)
    parts: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    absent: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # part -> line, step and file
    traces: list[str] = field(default_factory=list)
    layouts: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    files: dict[tuple[str, int | None], LeafFile] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """How many records count so far."""
        return len(self.traces)

    def line(self, start: int, line: bytes) -> None:
        """Take one line. Raises LedgerError with what is wrong."""
        self.step_at_line = None if self.last_step is None else self.last_step + 1
        self.lines += 1
        body = decode_line(line)
        if body["chain"] != self.chain:
            raise LedgerError("its chain is not the digest of the line before: a line was changed, dropped or moved")
        self.chain = chain_of(line)
        if (body["kind"] == "header") != (start == 0):
            raise LedgerError("a ledger has one header, as its first line")
        if self.closed and body["kind"] != "seam":
            raise LedgerError(f"a {body['kind']} line follows a closed run without a seam")
        self.closed = False
        getattr(self, f"_{body['kind']}")(start, body)

    def torn_leaves(self) -> dict[str, int]:
        """Kind -> bytes of leaves that no record names."""
        torn: dict[str, int] = {}
        for kind, part in leaf_files(self.directory):
            beyond = leaf_bytes(self.directory, kind, part) - self.ends.get((kind, part), 0)
            if beyond > 0:  # below: dropped since it was listed, by the run that writes
                torn[kind] = torn.get(kind, 0) + beyond
        return torn

    def missing_leaves(self) -> tuple[int, int, str] | None:
        """The first line whose leaves are gone though no line drops them: its number, its step, and what is wrong."""
        for part, (line, step, name) in self.absent.items():
            if part not in self.dropped:
                return line, step, f"its leaves are gone: {name} does not exist, and no line says that it was dropped"
        return None

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _header(self, start: int, body: dict[str, Any]) -> None:
        if body["format"] != FORMAT:
            raise LedgerError(f"the ledger has format {body['format']}; this version reads format {FORMAT}")
        self.trace, self.segment = start_trace(body), start
        if body["resumed_from"] is not None:
            self.last_step = body["resumed_from"]["step"]

    def _layout(self, start: int, body: dict[str, Any]) -> None:
        names = layout_names(body, kind=body["of"], layout_id=start)
        self.layouts[body["of"], start] = root_prefixes(names)

    def _record(self, start: int, body: dict[str, Any]) -> None:
        record = record_of(body)
        self.step_at_line = record.step
        if self.last_step is not None and record.step != self.last_step + 1:
            raise LedgerError(f"it is the record of step {record.step}; step {self.last_step + 1} should follow")
        if body["segment"] != self.segment:
            raise LedgerError(f"its segment is {body['segment']}, not {self.segment}")
        if record.trace != next_trace(self.trace, record.agree):
            raise LedgerError("its trace does not follow from the trace before and its own fields")
        present = [self._leaves(kind, place, record) for kind, place in record.leaves.items()]
        self.without_leaves += not all(present)
        self.first_step = record.step if self.first_step is None else self.first_step
        self.trace, self.last_step = record.trace, record.step
        self.traces.append(record.trace)

    def _leaves(self, kind: str, place: LeafPlace, record: Record) -> bool:
        """Check a row of leaves; False if its file is not there, which `missing_leaves` judges."""
        layout_id, offset, part = place
        if (kind, layout_id) not in self.layouts:
            raise LedgerError(f"it names the layout {layout_id} of {kind}, which no line before it defines")
        next_offset = self.ends.get((kind, part), 0)
        if offset != next_offset:
            raise LedgerError(f"its {kind} leaves are said to lie at byte {offset}; byte {next_offset} is next")
        prefixes, path = self.layouts[kind, layout_id], leaf_path(self.directory, kind, part)
        self.ends[kind, part] = offset + LEAF_BYTES * len(prefixes)
        if part is not None:
            self.parts.add(part)
        if (kind, part) not in self.files:
            leaves = open_leaves(self.directory, kind, part)
            if leaves is None:
                self.absent.setdefault(part, (self.lines, record.step, path.name))
                return False
            self.files[kind, part] = leaves
        row = self.files[kind, part].row(offset, LEAF_BYTES * len(prefixes))
        if root_of_row(prefixes, row) != record.agree["roots"].get(kind):
            raise LedgerError(f"the {kind} leaves at byte {offset} of {path.name} do not have the root it records")
        return True

    def _dropped(self, start: int, body: dict[str, Any]) -> None:
        if body["part"] not in self.parts:
            raise LedgerError(f"it drops the part {body['part']} of the leaves, which no record before it names")
        self.dropped.add(body["part"])

    def _seam(self, start: int, body: dict[str, Any]) -> None:
        if body["previous_segment"] != self.segment:
            raise LedgerError(f"its previous segment is {body['previous_segment']}, not {self.segment}")
        kept = -1 if self.first_step is None else body["step"] - self.first_step
        if not 0 <= kept < len(self.traces) or self.traces[kept] != body["trace"]:
            raise LedgerError(f"no record of step {body['step']} with the trace it names stands before it")
        self.superseded += len(self.traces) - kept - 1
        del self.traces[kept + 1 :]
        self.trace, self.last_step, self.segment = body["trace"], body["step"], start

    def _checkpoint(self, start: int, body: dict[str, Any]) -> None:
        if self.last_step is None or body["step"] > self.last_step:
            raise LedgerError(f"it is a checkpoint of step {body['step']}, which has no record before it")

    def _closed(self, start: int, body: dict[str, Any]) -> None:
        if body["records"] != len(self.traces) or body["last_step"] != max(self.last_step or 0, 0):
            raise LedgerError(
                f"the run closed with {body['records']} records up to step {body['last_step']}, "
                f"but {len(self.traces)} up to step {self.last_step} stand here"
            )
        self.closed = True
