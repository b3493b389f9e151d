"""The whole lines of a file, reached by byte position without reading the rest of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from det_lightning.errors import LedgerError
from det_lightning.ledger.lines import MAX_LINE_BYTES

_BLOCK_BYTES = 1 << 13
_SCAN_BYTES = 1 << 20


def open_regular(path: Path):
    """An unbuffered binary file.

    Raises LedgerError if there is no readable regular file (pipes and devices are refused: reading them may
    never end).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise LedgerError(f"{path} is not a regular file")
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise LedgerError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class LineFile:
    """A view of the lines that were whole when it was made; bytes after the last newline are counted in
    torn_bytes and never read.

    A line is named by the byte offset of its first byte. Every method raises LedgerError for a line above
    MAX_LINE_BYTES or a failing read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open_regular(path)
        self.file_bytes = os.fstat(self._file.fileno()).st_size
        self.end = self._newline_before(self.file_bytes) + 1
        self.torn_bytes = self.file_bytes - self.end

    def close(self) -> None:
        self._file.close()

    def line_at(self, start: int) -> tuple[bytes, int]:
        """The line that starts at `start`, without its newline, and the start of the next one."""
        if not 0 <= start < self.end:
            raise LedgerError(f"{self.path} has no line at byte {start}; its lines end at byte {self.end}")
        size = _BLOCK_BYTES
        while True:
            chunk = self._read(start, min(size, self.end - start))
            length = chunk.find(b"\n")
            if length >= 0:
                return chunk[:length], start + length + 1
            if len(chunk) > MAX_LINE_BYTES or start + len(chunk) >= self.end:
                raise LedgerError(f"{self.path}: the line at byte {start} does not end within {MAX_LINE_BYTES} bytes")
            size *= 8

    def start_of_line(self, position: int) -> int:
        """The start of the line that holds the byte at `position`."""
        return self._newline_before(position) + 1

    def lines(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(start, line) for every line from `start` up to `end`, in order, reading ahead in large blocks."""
        end = self.end if end is None else end
        position, rest = start, b""
        while position < end:
            block = self._read(position + len(rest), min(_SCAN_BYTES, end - position - len(rest)))
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield position, line
                position += len(line) + 1
            if len(rest) > MAX_LINE_BYTES:
                raise LedgerError(
                    f"{self.path}: the line at byte {position} does not end within {MAX_LINE_BYTES} bytes"
                )

    def _newline_before(self, position: int) -> int:
        """Offset of the last newline before `position`, or -1."""
        upper, size = position, _BLOCK_BYTES
        while upper > 0:
            lower = max(0, upper - size)
            found = self._read(lower, upper - lower).rfind(b"\n")
            if found >= 0:
                return lower + found
            if position - lower > MAX_LINE_BYTES:
                raise LedgerError(
                    f"{self.path} has no line end in the {MAX_LINE_BYTES} bytes before byte {position}: it "
                    "is not a ledger"
                )
            upper, size = lower, size * 8
        return -1

    def _read(self, start: int, size: int) -> bytes:
        try:
            data = os.pread(self._file.fileno(), size, start)
        except (OSError, ValueError, OverflowError) as error:
            raise LedgerError(f"{self.path} cannot be read at byte {start}: {error}") from None
        if len(data) != size:
            raise LedgerError(
                f"{self.path} ended at byte {start + len(data)} while it was read: it was cut or replaced"
            )
        return data
