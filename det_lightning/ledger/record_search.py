"""Finds records in ledger.jsonl by bisecting byte positions, so that a few lines are read and not the file.

A ledger that was resumed has *segments*: the header opens the first, every seam opens another, and steps
start again after the step the seam names. Records that a later seam went back behind no longer count. Records
point to the start of their segment and seams to the segment before, so the way back from the last line finds
all segments in as many reads as there are seams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.line_file import LineFile
from det_lightning.ledger.lines import decode_line, record_of
from det_lightning.ledger.record import Record


@dataclass(frozen=True)
class Segment:
    """Lines in bytes [start, end); its records that count have base < step <= last. opener: its header or
    seam.
    """

    opener: int
    start: int
    end: int
    base: int
    last: int


class RecordSearch(LineFile):
    """The lines of a ledger, each checked against its seal when read.

    Every method raises LedgerError for a damaged line, naming the file and the byte where the line starts.
    """

    def body(self, start: int) -> tuple[dict[str, Any], int]:
        """The fields of the line at `start`, and the start of the next line."""
        line, next_start = self.line_at(start)
        return self._decode(start, line), next_start

    def bodies(self, kind: str, start: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(start, fields) of every line of `kind` in [start, end), in order; other lines are passed over."""
        mark = f'"kind":"{kind}"'.encode()
        for position, line in self.lines(start, end):
            if mark in line:
                body = self._decode(position, line)
                if body["kind"] == kind:
                    yield position, body

    def backwards(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(start, fields) of every line, the last one first."""
        start = self.end
        while start > 0:
            start = self.start_of_line(start - 1)
            yield start, self.body(start)[0]

    def record(self, start: int, body: dict[str, Any]) -> Record:
        """The record in the fields of the record line at `start`."""
        try:
            return record_of(body)
        except LedgerError as error:
            raise self.damage(start, str(error)) from None

    def first_record(self, start: int, end: int) -> tuple[Record, int] | None:
        """The first record among the lines of [start, end) and the start of the line after it."""
        while start < end:
            body, next_start = self.body(start)
            if body["kind"] == "record":
                return self.record(start, body), next_start
            start = next_start
        return None

    def find(self, step: int) -> Record | None:
        """The record of `step` that counts, None if there is none."""
        for segment in reversed(self.segments):
            if segment.base < step <= segment.last:
                return self._bisect(segment, step)
        return None

    def damage(self, start: int, what: str) -> LedgerError:
        return LedgerError(f"{self.path} is damaged at the line that starts at byte {start}: {what}")

    @cached_property
    def newest_segment(self) -> tuple[int, int]:
        """Start of the header or seam that opened the newest segment, and the last step in it (-1: none)."""
        for start, body in self.backwards():
            if body["kind"] == "record":
                return body["segment"], body["step"]
            if body["kind"] == "seam":
                return start, body["step"]
        return 0, -1

    @cached_property
    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        opener, cut = self.newest_segment
        end, found = self.end, []
        while True:
            body, next_start = self.body(opener)
            if body["kind"] not in ("header", "seam"):
                raise self.damage(opener, "its segment is said to start here, but it is no header or seam")
            if body["kind"] == "header":
                found.append(Segment(opener, next_start, end, -1, cut))
                return found[::-1]
            found.append(Segment(opener, next_start, end, body["step"], cut))
            if body["previous_segment"] >= opener:
                raise self.damage(opener, "its previous segment does not lie before it")
            cut, end, opener = min(cut, body["step"]), opener, body["previous_segment"]

    def _bisect(self, segment: Segment, step: int) -> Record | None:
        """Lines of records are about equally long, so every other try goes where the step should lie by its number."""
        low, high = segment.start, segment.end
        low_step, high_step = segment.base + 1, segment.last + 1
        halve = False
        while low < high:
            share = 0.5 if halve or high_step <= low_step else (step - low_step + 0.5) / (high_step - low_step)
            halve = not halve
            middle = self.start_of_line(low + int((high - low - 1) * min(max(share, 0.0), 1.0)))
            found = self.first_record(middle, high)
            if found is None or found[0].step > step:
                high = middle
                high_step = found[0].step if found is not None else high_step
            elif found[0].step < step:
                low, low_step = found[1], found[0].step + 1
            else:
                return found[0]
        return None

    def _decode(self, start: int, line: bytes) -> dict[str, Any]:
        try:
            return decode_line(line)
        except LedgerError as error:
            raise self.damage(start, str(error)) from None
