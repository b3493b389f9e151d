"""Rows of tensor digests, 16 bytes per tensor, row after row, and nothing else.

leaves-<kind>.bin holds those of one kind of state that stay; leaves-<kind>-<part>.bin those of a few records in a row, which
go when the part is dropped (ledger/retention.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from det_lightning.errors import LedgerError
from det_lightning.ledger.line_file import open_regular
from det_lightning.ledger.record import KINDS

_NAME = re.compile(rf"leaves-({'|'.join(KINDS)})(?:-(0|[1-9][0-9]{{0,18}}))?\.bin")


def leaf_path(directory: Path, kind: str, part: int | None = None) -> Path:
    """Where the leaves of `kind` lie.

    Raises LedgerError for a kind that is not one of KINDS, so no name can lead elsewhere.
    """
    if kind not in KINDS:
        raise LedgerError(f"unknown kind of state {kind!r:.80}; known kinds: {', '.join(KINDS)}")
    return directory / (f"leaves-{kind}.bin" if part is None else f"leaves-{kind}-{int(part)}.bin")


def leaf_files(directory: Path) -> list[tuple[str, int | None]]:
    """(kind, part) of every leaf file in `directory`, empty ones too; part None first, then rising."""
    try:
        found = [_NAME.fullmatch(name) for name in os.listdir(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LedgerError(f"{directory} cannot be read: {error.strerror}") from None
    files = [(match[1], None if match[2] is None else int(match[2])) for match in found if match]
    return sorted(files, key=lambda each: (-1 if each[1] is None else each[1], each[0]))


def leaf_bytes(directory: Path, kind: str, part: int | None = None) -> int:
    """Size of a leaf file, 0 if there is none."""
    path = leaf_path(directory, kind, part)
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from None


class LeafFile:
    """The leaves of one kind, read row by row.

    Raises LedgerError if the file is missing, unreadable or shorter than a row needs.
    """

    def __init__(self, directory: Path, kind: str, part: int | None = None):
        self.path = leaf_path(directory, kind, part)
        self._file = open_regular(self.path)

    def close(self) -> None:
        self._file.close()

    @property
    def file_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def row(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`."""
        try:
            row = os.pread(self._file.fileno(), size, offset)
        except (OSError, OverflowError) as error:
            raise LedgerError(f"{self.path} cannot be read at byte {offset}: {error}") from None
        if len(row) != size:
            raise LedgerError(
                f"{self.path} has {self.file_bytes} bytes, but a record needs bytes {offset} to "
                f"{offset + size}: the file was cut"
            )
        return row


def open_leaves(directory: Path, kind: str, part: int | None = None) -> LeafFile | None:
    """The leaves of one kind; None if they lie in a part that is not there.

    A run that goes on may drop a part at any moment, so it is opened first and looked for afterwards.
    """
    try:
        return LeafFile(directory, kind, part)
    except LedgerError:
        if part is None or leaf_path(directory, kind, part).exists():
            raise
        return None
