"""Rows of tensor digests, one file per kind of state: leaves-<kind>.bin holds 16 bytes per tensor, row after
row, and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

from det_lightning.errors import LedgerError
from det_lightning.ledger.line_file import open_regular
from det_lightning.ledger.record import KINDS


def leaf_path(directory: Path, kind: str) -> Path:
    """Where the leaves of `kind` lie.

    Raises LedgerError for a kind that is not one of KINDS, so no name can lead elsewhere.
    """
    if kind not in KINDS:
        raise LedgerError(f"unknown kind of state {kind!r:.80}; known kinds: {', '.join(KINDS)}")
    return directory / f"leaves-{kind}.bin"


class LeafFile:
    """The leaves of one kind, read row by row.

    Raises LedgerError if the file is missing, unreadable or shorter than a row needs.
    """

    def __init__(self, directory: Path, kind: str):
        self.path = leaf_path(directory, kind)
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
