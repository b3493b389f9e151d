"""What a ledger's header says of the program's repository."""

import sys

import pytest
from det_lightning.callbacks import repository_state as repository
from det_lightning.callbacks.repository_state import repository_state

PROGRAM = """#!/bin/sh
case "$*" in
    "--no-optional-locks -C "*" rev-parse HEAD") echo 0123abc;;
    "--no-optional-locks -C "*" status "*) {status};;
    *) exit 129;;
esac
"""


@pytest.mark.parametrize(
    ("status", "dirty"), [("true", False), ("echo ' M model.py'", True), ("exit 1", None), ("exec sleep 60", None)]
)
def test_a_git_that_cannot_tell_what_changed_is_no_missing_repository(tmp_path, monkeypatch, status, dirty):
    git = tmp_path / "git"
    git.write_text(PROGRAM.format(status=status))
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(repository, "SECONDS", 2)
    assert repository_state() == {"commit": "0123abc", "dirty": dirty}


def test_a_program_outside_a_repository_has_none(tmp_path, monkeypatch):
    program = tmp_path / "train.py"
    program.touch()
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert repository_state() is None
