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
from det_lightning.ledger.leaf_file import leaf_bytes, leaf_files, leaf_path
from det_lightning.ledger.record import LEAF_BYTES, root_of_row, root_prefixes

LeafEnds = Mapping[tuple[str, int | None], int]
"""(kind, part) -> bytes of that file."""


class LeafWriter:
    """The growing ends of the leaf files in `directory`.

    ends: bytes that belong to records; what lies beyond is cut off and counted in torn_bytes.
    write_layout: writes a layout line with the fields it is given and returns the layout id.
    """

    def __init__(self, directory: Path, ends: LeafEnds, write_layout: Callable[[dict[str, Any]], int]):
        self._directory = directory
        self._write_layout = write_layout
        self._layouts: dict[str, tuple[list[str], int, list[bytes]]] = {}
        self._files: dict[tuple[str, int | None], AppendFile] = {}
        self.torn_bytes = 0
        for kind, part in leaf_files(directory):
            end = ends.get((kind, part), 0)
            self.torn_bytes += leaf_bytes(directory, kind, part) - end
            if part is not None and not end:
                self._unlink(kind, part)
            else:
                self._files[kind, part] = AppendFile(leaf_path(directory, kind, part), size=end)

    @property
    def parts(self) -> list[int]:
        """Those of which a file is there, rising."""
        return sorted({part for _, part in self._files if part is not None})

    def append(self, kind: str, digests: Mapping[str, bytes], part: int | None = None) -> tuple[str, list[int]]:
        """Write one row and return its root and its [layout id, byte offset], and the part if it goes to one.

        Raises LedgerError, before anything is written, for an unknown kind or a digest that is not 16 bytes.
        """
        if not digests:
            part = None  # an empty row takes no file
        path = leaf_path(self._directory, kind, part)
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
        if (kind, part) not in self._files:
            self._files[kind, part] = AppendFile(path, size=0)
        place = [layout_id, self._files[kind, part].append(row)]
        return root_of_row(prefixes, row), place if part is None else [*place, part]

    def ends(self) -> LeafEnds:
        """Sizes of the files now; hand it to `cut` to take back what is appended from here on."""
        return {each: file.size for each, file in self._files.items()}

    def cut(self, ends: LeafEnds) -> None:
        for each, file in self._files.items():
            file.take_back(ends.get(each, 0))

    def drop(self, part: int) -> None:
        """Delete the files of a part. Raises LedgerError if one cannot be deleted."""
        for kind, of in [each for each in self._files if each[1] == part]:
            self._files.pop((kind, of)).close()
            self._unlink(kind, part)

    def _unlink(self, kind: str, part: int) -> None:
        path = leaf_path(self._directory, kind, part)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise LedgerError(f"{path} cannot be deleted: {error.strerror}") from None

    def flush_to_disk(self) -> None:
        for file in self._files.values():
            file.flush_to_disk()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
