"""Writes a ledger: one record after another, each complete on the file before the next begins.

Leaves go first, then the line, each as one os.write: a process killed at any moment loses at most the record
it was writing. What such a death leaves behind (a torn last line, leaf rows without a record) is cut off and
counted when the ledger is reopened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.append_file import AppendFile
from det_lightning.ledger.fresh_directory import refuse_old_ledger
from det_lightning.ledger.leaf_writer import LeafEnds, LeafWriter
from det_lightning.ledger.lines import (
    FIRST_CHAIN,
    FORMAT,
    LEDGER_FILE,
    chain_of,
    decode_line,
    encode_line,
    record_of,
    start_trace,
)
from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import Record, next_trace
from det_lightning.ledger.retention import LeafParts, Retention


class LedgerWriter:
    """The growing end of one ledger. Made by `create` or `reopen`; use from one process and one thread.

    torn_bytes, torn_leaf_bytes: what `reopen` cut off the lines and the leaves, 0 after a clean end.
    trace, step: of the last record (or of what the run continues); step is None before the first.
    """

    def __init__(
        self,
        path: Path,
        lines: AppendFile,
        *,
        chain: str,
        trace: str,
        step: int | None,
        first_step: int | None,
        segment: int,
        leaf_ends: LeafEnds | None = None,
        retention: Retention | None = None,
    ):
        self.path = path
        self.trace = trace
        self.step = step
        self.torn_bytes = 0
        self._lines = lines
        self._chain = chain
        self._first_step = first_step
        self._segment = segment
        self._leaves = LeafWriter(path, leaf_ends or {}, self._write_layout)
        self.torn_leaf_bytes = self._leaves.torn_bytes
        self._parts = LeafParts(retention, self._leaves.parts)
        self._ended = False

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        recipe: Mapping[str, Any],
        environment: Mapping[str, Any],
        entry: Mapping[str, Any],
        resumed_from: Mapping[str, Any] | None = None,
        retention: Retention | None = None,
    ) -> LedgerWriter:
        """Start a ledger in directory `path` (made if missing).

        resumed_from: {"step", "trace"} of the record of another ledger that this run continues; the first
        record is then step + 1. retention: which leaves are kept; None: all.
        Raises LedgerError if a ledger is already there, or if it cannot be written.
        """
        directory = Path(path).absolute()  # code may change the working directory while it trains
        header = {
            "format": FORMAT,
            "recipe": dict(recipe),
            "environment": dict(environment),
            "entry": dict(entry),
            "resumed_from": None if resumed_from is None else dict(resumed_from),
        }
        line, trace = encode_line("header", header, FIRST_CHAIN), start_trace(header)
        refuse_old_ledger(directory)
        final = directory / LEDGER_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"no ledger can be started in {directory}: {error.strerror}") from None
        # The header appears whole or not at all: a death here leaves a ledger.jsonl.new that the next start overwrites.
        # Its lock moves with it, and whoever starts in the same moment finds it, or the ledger.
        fresh = AppendFile(directory / f"{LEDGER_FILE}.new", size=0, locked=True, absent=final)
        try:
            fresh.append(line)
            os.rename(fresh.path, final)
        except OSError as error:
            fresh.close()
            raise LedgerError(f"no ledger can be started in {directory}: {error.strerror}") from None
        except BaseException:
            fresh.close()
            raise
        fresh.path = final
        step = None if resumed_from is None else resumed_from["step"]
        return cls(
            directory,
            fresh,
            chain=chain_of(line[:-1]),
            trace=trace,
            step=step,
            first_step=None,
            segment=0,
            retention=retention,
        )

    @classmethod
    def reopen(
        cls,
        path: str | Path,
        *,
        step: int,
        trace: str,
        environment: Mapping[str, Any],
        retention: Retention | None = None,
    ) -> LedgerWriter:
        """Continue the ledger in `path` after its record of `step`, whose trace must be `trace`, and write a
        seam.

        Later records stay in the file but no longer count. Raises LedgerError if there is no such record or
        its trace is another.
        """
        directory = Path(path).absolute()  # code may change the working directory while it trains
        LedgerReader(directory).close()  # there is one; what it holds is read once nobody else can write it
        lines = AppendFile(directory / LEDGER_FILE, locked=True)
        try:
            with LedgerReader(directory) as reader:
                record = reader.record(step)
                if record.trace != trace:
                    raise LedgerError(
                        f"{directory} holds another run: its trace after step {step} is {record.trace[:16]}..., the state "
                        f"to continue from has {trace[:16]}...; write to a new directory, or resume from a checkpoint of "
                        f"that run"
                    )
                first_step, newest_segment = reader.first_step, reader.newest_segment
                leaf_ends, torn_bytes = reader.leaf_ends(), reader.torn_bytes
                last_line, end = reader.last_line()
            lines.cut(end)
            writer = cls(
                directory,
                lines,
                chain=chain_of(last_line),
                trace=trace,
                step=step,
                first_step=first_step,
                segment=end,
                leaf_ends=leaf_ends,
                retention=retention,
            )
        except BaseException:
            lines.close()
            raise
        writer.torn_bytes = torn_bytes
        seam = {
            "step": step,
            "trace": trace,
            "torn_bytes": torn_bytes,
            "environment": dict(environment),
            "previous_segment": newest_segment,
        }
        writer._write_line("seam", seam)
        return writer

    def append(
        self, agree: Mapping[str, Any], leaves: Mapping[str, Mapping[str, bytes]], facts: Mapping[str, Any]
    ) -> Record:
        """Write the next record and return it.

        agree: the fields that must agree, with "step" one above the last; its "roots" gets the root of every
        kind in `leaves`.
        leaves: kind -> tensor name -> 16-byte tensor digest. facts: anything else. Raises LedgerError, and the ledger is
        then as before; only where old leaves cannot be deleted the record stands.
        """
        self._refuse_if_ended()
        step, given_roots = agree.get("step"), agree.get("roots") or {}
        if not isinstance(given_roots, Mapping):
            raise LedgerError(f"roots map a kind of state to its digest; {given_roots!r:.60} was given")
        if type(step) is not int or step < 0 or (self.step is not None and step != self.step + 1):
            wanted = "a whole number from 0" if self.step is None else self.step + 1
            raise LedgerError(f"the next record of {self.path} is for step {wanted}, not {step!r}")
        ends, part = self._leaves.ends(), self._parts.part_of(step, self._lines.size)
        roots, places = dict(given_roots), {}
        try:
            for kind, digests in leaves.items():
                roots[kind], places[kind] = self._leaves.append(kind, digests, part)
            agree = {**agree, "roots": roots}
            trace = next_trace(self.trace, agree)
            fields = {
                "step": step,
                "agree": agree,
                "facts": dict(facts),
                "leaves": places,
                "trace": trace,
                "segment": self._segment,
            }
            record = record_of(self._write_line("record", fields))
        except LedgerError:
            self._leaves.cut(ends)
            raise
        except BaseException:
            self.abandon()  # as in _write_line
            raise
        self.trace, self.step = trace, step
        self._first_step = step if self._first_step is None else self._first_step
        in_part = any(place.part is not None for place in record.leaves.values())
        for passed in self._parts.recorded(part if in_part else None):
            self._drop(passed)
        return record

    def checkpoint(self, step: int, path: str, digest: str) -> None:
        """Note that the state after `step` lies at `path`, and flush all of the ledger to disk; digest: hex,
        or empty.
        """
        if self.step is None or step > self.step:
            raise LedgerError(f"{self.path} has no record of step {step} yet, so no checkpoint of it can be noted")
        self._write_line("checkpoint", {"step": step, "path": str(path), "digest": digest})
        self._flush_to_disk()

    def close(self) -> None:
        """Say that the run is finished, flush to disk and close the files. A second call does nothing."""
        if not self._ended:
            count = 0 if self._first_step is None else self.step - self._first_step + 1
            self._write_line("closed", {"records": count, "last_step": max(self.step or 0, 0)})
            self._flush_to_disk()
            self.abandon()

    def abandon(self) -> None:
        """Close the files without saying that the run is finished, as after an exception.

        A second call does nothing.
        """
        if not self._ended:
            self._ended = True
            self._lines.close()
            self._leaves.close()

    def _drop(self, part: int) -> None:
        """The line first, so that a file that is missing without one is known as damage."""
        self._write_line("dropped", {"part": part})
        try:
            self._lines.flush_to_disk()
            self._leaves.drop(part)
        except LedgerError:
            raise
        except BaseException:
            self.abandon()  # as in _write_line
            raise

    def _write_layout(self, fields: Mapping[str, Any]) -> int:
        layout_id = self._lines.size
        self._write_line("layout", {**fields, "id": layout_id})
        return layout_id

    def _write_line(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line, checked as a reader would check it, and return its fields as written."""
        self._refuse_if_ended()
        line = encode_line(kind, fields, self._chain)
        body = decode_line(line[:-1])
        if kind == "record":
            record_of(body)
        try:
            self._lines.append(line)
            self._chain = chain_of(line[:-1])
        except LedgerError:
            raise
        except BaseException:
            self.abandon()  # an interrupt may have come on either side of the write; reopen sorts that out
            raise
        return body

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise LedgerError(f"the ledger {self.path} was closed; reopen it to write more")

    def _flush_to_disk(self) -> None:
        self._leaves.flush_to_disk()
        self._lines.flush_to_disk()
