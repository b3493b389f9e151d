"""Appends rows of tensor digests to the leaf files of a ledger, and writes a layout line whenever names
change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.append_file import AppendFile
from det_lightning.ledger.leaf_file import leaf_path
from det_lightning.ledger.record import KINDS, LEAF_BYTES, root_of_row, root_prefixes


def leaf_bytes(directory: Path, kind: str) -> int:
    """Size of the leaf file of `kind`, 0 if there is none."""
    try:
        return os.stat(leaf_path(directory, kind)).st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise LedgerError(f"{leaf_path(directory, kind)} cannot be read: {error.strerror}") from None


class LeafWriter:
    """The growing ends of the leaf files in `directory`.

    ends: kind -> bytes that belong to records; what lies beyond is cut off and counted in torn_bytes.
    write_layout: writes a layout line with the fields it is given and returns the layout id.
    """

    def __init__(self, directory: Path, ends: Mapping[str, int], write_layout: Callable[[dict[str, Any]], int]):
        self._directory = directory
        self._write_layout = write_layout
        self._layouts: dict[str, tuple[list[str], int, list[bytes]]] = {}
        self._files: dict[str, AppendFile] = {}
        self.torn_bytes = 0
        for kind in KINDS:
            size = leaf_bytes(directory, kind)
            if size:
                end = ends.get(kind, 0)
                self.torn_bytes += size - end
                self._files[kind] = AppendFile(leaf_path(directory, kind), size=end)

    def append(self, kind: str, digests: Mapping[str, bytes]) -> tuple[str, list[int]]:
        """Write one row and return its root and its [layout id, byte offset].

        Raises LedgerError, before anything is written, for an unknown kind or a digest that is not 16 bytes.
        """
        path = leaf_path(self._directory, kind)
        for name, digest in digests.items():
            if not isinstance(name, str):
                raise LedgerError(f"{kind} has a tensor named {name!r:.60}; names are text")
            if not isinstance(digest, bytes) or len(digest) != LEAF_BYTES:
                raise LedgerError(
                    f"the digest of {kind} {name!r} is {digest!r:.60}; a tensor digest is {LEAF_BYTES} bytes"
                )
        names = sorted(digests)
        if kind not in self._layouts or self._layouts[kind][0] != names:
            prefixes = root_prefixes(names)
            self._layouts[kind] = (names, self._write_layout({"of": kind, "names": names}), prefixes)
        _, layout_id, prefixes = self._layouts[kind]
        row = b"".join(digests[name] for name in names)
        if kind not in self._files:
            self._files[kind] = AppendFile(path, size=0)
        return root_of_row(prefixes, row), [layout_id, self._files[kind].append(row)]

    def ends(self) -> dict[str, int]:
        """Kind -> size of its file now; hand it to `cut` to take back what is appended from here on."""
        return {kind: file.size for kind, file in self._files.items()}

    def cut(self, ends: Mapping[str, int]) -> None:
        for kind, file in self._files.items():
            file.cut(ends.get(kind, 0))

    def flush_to_disk(self) -> None:
        for file in self._files.values():
            file.flush_to_disk()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
