"""A process that appends records to a ledger until it is killed, and goes on where the last one was killed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from det_lightning.ledger.chain import ChainReport, verify_chain

_WRITER = """
import sys
from det_lightning.ledger.retention import Retention
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.ledger.example_runs import append_steps
path, known, *kept = sys.argv[1:]
retention = Retention(*map(int, kept)) if kept else None
try:
    with LedgerReader(path) as reader:
        record = reader.record(reader.last_step)
    writer = LedgerWriter.reopen(path, step=record.step, trace=record.trace, environment={}, retention=retention)
except ValueError:
    writer = LedgerWriter.create(path, recipe={}, environment={}, entry={}, retention=retention)
with open(known, "a", buffering=1) as done:
    for step in range(0 if writer.step is None else writer.step + 1, 10**6):
        append_steps(writer, [step])
        done.write(f"{step}\\n")
"""


def start_writer(path: Path, known: Path, *kept: int) -> subprocess.Popen:
    """Appends to the ledger at `path` and writes each step that is done to `known`; kept: arguments of a Retention."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _WRITER, str(path), str(known), *map(str, kept)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def kill_writers(
    path: Path, *kept: int, kills: int, records: int, seed: int
) -> Iterator[tuple[list[int], ChainReport]]:
    """Kills writers one after another, each at a moment after `records` more records: the steps that were said to be done
    and what the chain is then, which is sound."""
    rng, known = random.Random(seed), path.parent / "known"
    for _ in range(kills):
        before = known.read_text().count("\n") if known.exists() else 0
        process = start_writer(path, known, *kept)
        while process.poll() is None and (not known.exists() or known.read_text().count("\n") < before + records):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
        process.stderr.close()
        report = verify_chain(path)
        assert report.sound, report.damage
        yield [int(line) for line in known.read_text().split("\n")[:-1]], report
