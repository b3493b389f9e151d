"""Reads a ledger: header, any record by its step, leaves, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.chain import ChainReport, verify_chain
from det_lightning.ledger.leaf_file import LeafFile, leaf_files, leaf_path, open_leaves
from det_lightning.ledger.lines import FORMAT, LEDGER_FILE, layout_names, start_trace
from det_lightning.ledger.record import LEAF_BYTES, Record
from det_lightning.ledger.record_search import RecordSearch


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that the run wrote after `step`; digest: hex over its state, or empty."""

    step: int
    path: str
    digest: str


UNLIKE_RECORD = "unlike_record"
"""In the environment of a seam: what is in `Resume.unlike`; left out if the state is the recorded one."""


@dataclass(frozen=True)
class Resume:
    """A new start in the same ledger after `step`.

    torn_bytes: what was cut off the lines. environment: of the run from there on.
    """

    step: int
    torn_bytes: int
    environment: Mapping[str, Any]

    @property
    def unlike(self) -> tuple[str, ...]:
        """Kind and name of each tensor in which the run went on with another state than it had recorded after `step`."""
        names = self.environment.get(UNLIKE_RECORD)
        return tuple(each for each in names if isinstance(each, str)) if isinstance(names, list) else ()


class LedgerReader:
    """The ledger in directory `path` as it was when opened; a torn last line is only counted, in torn_bytes.

    Records behind which a later resume went back do not count. Raises LedgerError, here and in every method,
    for anything that is not a sound ledger, naming file and place. Each line it reads is checked against its
    seal; `verify_chain` checks all of them and the leaves.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._leaf_files: dict[tuple[str, int | None], LeafFile] = {}
        self._layouts: dict[tuple[str, int], list[str]] = {}
        if not self.path.is_dir():
            raise LedgerError(f"{self.path} is not a directory; a ledger is a directory with a {LEDGER_FILE}")
        self._lines = RecordSearch(self.path / LEDGER_FILE)
        if self._lines.end == 0:
            raise LedgerError(
                f"{self._lines.path} holds no whole line: no ledger was started here, or its file was emptied"
            )
        self.header = self._lines.body(0)[0]
        if self.header["kind"] != "header":
            raise self._lines.damage(0, f"it is a {self.header['kind']} line where the header should stand")
        if self.header["format"] != FORMAT:
            raise LedgerError(
                f"{self.path} has ledger format {self.header['format']}; this version reads format {FORMAT}"
            )
        try:
            self.start_trace = start_trace(self.header)
        except LedgerError as error:
            raise self._lines.damage(0, str(error)) from None
        self.torn_bytes = self._lines.torn_bytes

    def close(self) -> None:
        """Close the files; the reader is not usable afterwards."""
        for file in (self._lines, *self._leaf_files.values()):
            file.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recipe(self) -> dict[str, Any]:
        return self.header["recipe"]

    @property
    def environment(self) -> dict[str, Any]:
        """Of the first start; each seam carries the environment of its own."""
        return self.header["environment"]

    @property
    def entry(self) -> dict[str, Any]:
        return self.header["entry"]

    @property
    def resumed_from(self) -> dict[str, Any] | None:
        """{"step", "trace"} of the record in another ledger after which this one starts, or None."""
        return self.header["resumed_from"]

    @cached_property
    def closed(self) -> bool:
        """Whether the run said that it was finished."""
        return next(self._lines.backwards())[1]["kind"] == "closed"

    @cached_property
    def first_step(self) -> int | None:
        """Step of the first record, None if there is none."""
        found = self._lines.first_record(0, self._lines.end)
        return None if found is None else found[0].step

    @property
    def last_step(self) -> int | None:
        """Step of the last record that counts, None if there is none."""
        return None if self.first_step is None else self._lines.newest_segment[1]

    @property
    def count(self) -> int:
        """How many records count: one for each step from first_step to last_step."""
        return 0 if self.first_step is None else self.last_step - self.first_step + 1

    @cached_property
    def resumes(self) -> tuple[Resume, ...]:
        """Every new start of the run in this ledger, in the order written."""
        seams = (self._lines.body(segment.opener)[0] for segment in self._lines.segments[1:])
        return tuple(Resume(seam["step"], seam["torn_bytes"], seam["environment"]) for seam in seams)

    def record(self, step: int) -> Record:
        """The record of `step` that counts. Raises LedgerError if there is none."""
        found = self._lines.find(step)
        if found is None:
            holds = "no record"
            if self.first_step is not None:
                holds = f"the steps {self.first_step} to {self.last_step}"
            raise LedgerError(f"{self.path} has no record of step {step}; it holds {holds}")
        return found

    def records(self) -> Iterator[Record]:
        """Every record that counts, by rising step."""
        for segment in self._lines.segments:
            for start, body in self._lines.bodies("record", segment.start, segment.end):
                record = self._lines.record(start, body)
                if segment.base < record.step <= segment.last:
                    yield record

    def keeps_leaves(self, record: Record, kind: str) -> bool:
        """Whether the record has leaves of this kind and they were not dropped since."""
        if kind not in record.leaves:
            return False
        part = record.leaves[kind].part
        return part is None or (kind, part) in self._leaf_files or leaf_path(self.path, kind, part).exists()

    def row(self, record: Record, kind: str) -> tuple[list[str], bytes]:
        """Names of the tensors of `kind` and their 16-byte digests end to end; ([], b"") if none are kept."""
        if not self.keeps_leaves(record, kind):
            return [], b""
        layout_id, offset, part = record.leaves[kind]
        names = self._layout(kind, layout_id)
        if (kind, part) not in self._leaf_files:
            leaves = open_leaves(self.path, kind, part)
            if leaves is None:
                return [], b""  # dropped in this moment, by the run that writes
            self._leaf_files[kind, part] = leaves
        return names, self._leaf_files[kind, part].row(offset, LEAF_BYTES * len(names))

    def leaves(self, record: Record, kind: str) -> dict[str, str]:
        """Tensor name -> digest in hex (32 digits); empty if the record keeps no leaves of this kind."""
        names, row = self.row(record, kind)
        return {name: row[LEAF_BYTES * i : LEAF_BYTES * (i + 1)].hex() for i, name in enumerate(names)}

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Every checkpoint of a step that counts, in the order written."""
        return tuple(
            Checkpoint(body["step"], body["path"], body["digest"])
            for segment in self._lines.segments
            for _, body in self._lines.bodies("checkpoint", segment.start, segment.end)
            if body["step"] <= segment.last
        )

    def verify_chain(self, progress: Callable[[int, int], None] | None = None) -> ChainReport:
        """Check every byte that can be checked; see `chain.verify_chain`."""
        return verify_chain(self.path, progress=progress)

    @property
    def newest_segment(self) -> int:
        """Byte offset of the header or seam that the last records follow."""
        return self._lines.newest_segment[0]

    def last_line(self) -> tuple[bytes, int]:
        """The last whole line without its newline, and the byte after that newline."""
        return self._lines.line_at(self._lines.start_of_line(self._lines.end - 1))

    def leaf_ends(self) -> dict[tuple[str, int | None], int]:
        """(kind, part) -> how many bytes of that leaf file belong to records.

        What lies beyond was written for a record that never came.
        """
        ends: dict[tuple[str, int | None], int] = {}
        sought = set(leaf_files(self.path))
        for start, body in self._lines.backwards():
            # A part is named after the position at which it began: no line before it needs to be read.
            sought = {(kind, part) for kind, part in sought if part is None or part <= start}
            if not sought:
                break
            if body["kind"] == "record":
                record = self._lines.record(start, body)
                for kind, place in record.leaves.items():
                    if (kind, place.part) in sought:
                        ends[kind, place.part] = place.offset + len(self.row(record, kind)[1])
                        sought.remove((kind, place.part))
        return ends

    def _layout(self, kind: str, layout_id: int) -> list[str]:
        if (kind, layout_id) not in self._layouts:
            body, _ = self._lines.body(layout_id)
            try:
                self._layouts[kind, layout_id] = layout_names(body, kind=kind, layout_id=layout_id)
            except LedgerError as error:
                raise self._lines.damage(layout_id, str(error)) from None
        return self._layouts[kind, layout_id]
