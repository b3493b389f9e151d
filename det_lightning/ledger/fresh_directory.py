"""Where a ledger may be started: nothing that a run wrote is ever written over."""

from __future__ import annotations

import os
from pathlib import Path

from det_lightning.errors import LedgerError
from det_lightning.ledger.leaf_file import leaf_files, leaf_path
from det_lightning.ledger.lines import LEDGER_FILE


def refuse_old_ledger(directory: Path) -> None:
    """Raises LedgerError if `directory` is a file, or holds a ledger or leaves of one."""
    if directory.exists() and not directory.is_dir():
        raise LedgerError(f"{directory} is a file; a ledger needs a directory")
    if os.path.lexists(directory / LEDGER_FILE):
        raise LedgerError(
            f"{directory} already holds a ledger; choose another directory, delete that one, or resume the "
            "run to continue it"
        )
    for kind, part in leaf_files(directory):
        raise LedgerError(
            f"{leaf_path(directory, kind, part)} lies there without a {LEDGER_FILE}; choose an empty directory"
        )
