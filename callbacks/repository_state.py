"""What the program's git repository says of the code that runs."""

import os
import subprocess
import sys
from typing import Any

SECONDS = 10
"""That one question to git may take."""


def repository_state() -> dict[str, Any] | None:
    """ "commit" of the folder of the program and whether it is "dirty", changed since (None: git does not say, or takes too
    long to); None outside a repository."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and os.path.exists(sys.argv[0]) else "."
    commit = _answer(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _answer(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _answer(folder: str, *question: str) -> str | None:
    # Without optional locks it leaves alone what the user's own git is at.
    command = ["git", "--no-optional-locks", "-C", folder, *question]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
