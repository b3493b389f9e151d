"""Groups of GPU tests that run side by side (`tests/on_gpus.py`): none takes another with it, and none is forgotten."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tests import on_gpus

# Ignores an interrupt, and so does the process that it started.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("measured before", child.pid)
time.sleep(600)
"""
POLITE = """
import time
try:
    print("at it")
    time.sleep(600)
except KeyboardInterrupt:
    print("1 failed, 3 passed")
    raise SystemExit(2)
"""


def is_running(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_group_that_hangs_or_crashes_leaves_the_others_and_what_it_wrote(tmp_path, capsys, monkeypatch):
    programs = {
        "sound": "print('2 passed in 1 s')",
        "skipped": "print('3 skipped in 1 s')",
        "failed": "print('1 failed, 1 passed'); raise SystemExit(1)",
        "crashed": "import os, signal; print('tests/a.py::b'); os.kill(os.getpid(), signal.SIGKILL)",
        "not text": "import sys; sys.stdout.buffer.write(b'\\xff\\xfe')",
        "polite": POLITE,
        "stubborn": STUBBORN,
    }
    commands = {name: [sys.executable, "-c", program] for name, program in programs.items()}
    told, patience = "", time.monotonic() + 120

    def clock() -> float:
        """The limit of 1 is over when all that can end has ended; the grace of 10 after it, when the polite one has, or
        when one has waited too long for any of that."""
        nonlocal told
        told += capsys.readouterr().out
        polite, stubborn = ((tmp_path / f"{name}.log").read_text() for name in ("polite", "stubborn"))
        waiting = told.count("\n") == len(programs) - 2 and "at it" in polite and "measured" in stubborn
        over = "polite:" in told or time.monotonic() > patience
        return 100 if over else 2 if waiting else 0

    monkeypatch.setattr(on_gpus, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in what a shell starts in the background
    for name in programs:
        (tmp_path / f"{name.replace(' ', '-')}.log").touch()
    try:
        found = on_gpus.run(commands, tmp_path, dict(os.environ), ends=1, grace=10)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert set(found) == set(programs) and [name for name, how in found.items() if how.startswith("passed")] == [
        "sound"
    ]
    assert found["crashed"] == "NOT PASSED: tests/a.py::b" and found["skipped"].startswith("NOT PASSED: 3 skipped")
    assert found["polite"] == "NOT PASSED: 1 failed, 3 passed"
    printed = (told + capsys.readouterr().out).splitlines()
    assert printed.index("sound: passed: 2 passed in 1 s") < printed.index(f"stubborn: {found['stubborn']}")
    child = int(re.fullmatch(r"NOT PASSED: measured before (\d+)", found["stubborn"])[1])
    ends = time.monotonic() + 120
    while is_running(child) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not is_running(child)
    late = on_gpus.run(commands, tmp_path, dict(os.environ), time.monotonic() - 1)
    assert set(late.values()) == {"NOT PASSED: not begun, no time was left"}


def test_what_ends_the_groups_ends_what_they_started(tmp_path, monkeypatch):
    def interrupted(seconds):
        if "measured" in (tmp_path / "stubborn.log").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(on_gpus.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_gpus.run({"stubborn": [sys.executable, "-c", STUBBORN]}, tmp_path, dict(os.environ), time.monotonic() + 60)
    child = int((tmp_path / "stubborn.log").read_text().split()[-1])
    ends = time.monotonic() + 120
    while is_running(child) and time.monotonic() < ends:
        signal.sigtimedwait([], 0.05)
    assert not is_running(child)


def test_every_file_with_tests_of_a_gpu_is_in_a_group():
    marked = {
        str(path.relative_to(on_gpus.ROOT))
        for path in (on_gpus.ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.(cuda|multi_gpu)\b", path.read_text(encoding="utf-8")) and path != Path(__file__)
    }
    named = {each for _, *rest in [*on_gpus.SINGLE.values(), *on_gpus.SEVERAL.values()] for each in rest}
    assert {path for path in marked if not any(path == each or path.startswith(f"{each}/") for each in named)} == set()
    assert all((on_gpus.ROOT / each).exists() for each in named if each.startswith("tests/"))
    assert "tests/claims/test_gpu_ledger.py" in marked
