"""Runs one side of a comparison: in this process, or with another interpreter or in another directory.

Another process gets its orders and gives its answers as lines of JSON: `python -m det_lightning.replay.sides`.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from det_lightning.errors import DetError
from det_lightning.ledger.compare import difference_at
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.group import error_from_elsewhere, last_words
from det_lightning.replay.plan import plan_replay
from det_lightning.replay.replay import run_plan
from det_lightning.replay.run import ReplayPlan
from det_lightning.replay.step_recorder import Recording

PROTOCOL = 1
_TAIL = 2000


@dataclass(frozen=True)
class Side:
    """One of two runs and how its code is found.

    Attributes:
        ledger: its directory.
        entry: "package.module:function" instead of the recorded one.
        python: interpreter to run it with, or None for this one.
        cwd: directory to run it in, such as a git worktree, or None for this one.
        checkpoint: file to start its replays from, or None for the nearest that the ledger noted.
    """

    ledger: Path
    entry: str | None = None
    python: str | None = None
    cwd: Path | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What a replay of a side up to a step showed.

    Attributes:
        reached: the replay reproduced every record of the side before the step.
        reproduced: and that of the step too.
        step: the last step that was run.
        differs: names of fields and kinds in which its last record leaves the side's own.
        trace, roots: of its last record.
    """

    reached: bool
    reproduced: bool
    step: int
    differs: list[str]
    trace: str
    roots: dict[str, str]


class SideRunner:
    """Runs replays of sides; another interpreter or directory gets one process, which serves every replay of its side.

    Use as a context manager: it ends the processes it started.
    """

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._workers: dict[tuple[str, Path | None], subprocess.Popen] = {}

    def __enter__(self) -> "SideRunner":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            with suppress(BrokenPipeError):  # of a worker that ended before it had read its order
                worker.stdin.close()
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def run(self, side: Side, recording: Recording, *, world: int | None, accumulate: int | None) -> Outcome:
        """Replays `side` up to the recorded step, with the operations of that step written to the recording's folder.

        Raises:
            DetError: what the replay raised, with its traceback as a note if it ran in another process.
        """
        order = {
            "protocol": PROTOCOL,
            "ledger": str(side.ledger.resolve()),
            "entry": side.entry,
            "checkpoint": None if side.checkpoint is None else str(side.checkpoint.resolve()),
            "step": recording.step,
            "folder": str(recording.folder.resolve()),
            "capture": {str(rank): list(indices) for rank, indices in recording.capture.items()},
            "world": world,
            "accumulate": accumulate,
        }
        recording.folder.mkdir(parents=True, exist_ok=True)
        if side.python is None and side.cwd is None:
            return Outcome(**carry_out(order))
        answer = self._ask(side, order)
        if "error" in answer:
            message = f"the replay of {side.ledger} {_where(side)} failed: {answer['error']}"
            raise error_from_elsewhere(message, answer["traceback"])
        return Outcome(**answer)

    def start(self, side: Side) -> None:
        """Starts the process of a side that needs one, which then gets ready while something else runs."""
        key = side.python or sys.executable, side.cwd
        if (side.python is None and side.cwd is None) or key in self._workers:
            return
        try:
            with open(self._errors(len(self._workers)), "wb") as errors:
                self._workers[key] = subprocess.Popen(
                    [key[0], "-m", "det_lightning.replay.sides"],
                    cwd=side.cwd,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        except OSError as error:
            raise DetError(f"{key[0]} cannot be started {_where(side)}: {error.strerror}") from None

    def _ask(self, side: Side, order: dict[str, Any]) -> dict[str, Any]:
        self.start(side)
        key = side.python or sys.executable, side.cwd
        worker = self._workers[key]
        try:
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())
        except (OSError, ValueError):
            said = self._errors([*self._workers].index(key)).read_text(encoding="utf-8", errors="replace")
            last = said.strip().rpartition("\n")[2] or "nothing"
            raise error_from_elsewhere(
                f"the process for the replay of {side.ledger} {_where(side)} ended without an answer; det-lightning must be "
                f"importable there. The last that it said: {last}",
                said.strip()[-_TAIL:],
            ) from None

    def _errors(self, place: int) -> Path:
        return self._scratch / f"errors-{place}.txt"


def _where(side: Side) -> str:
    return f"with {side.python or sys.executable} in {side.cwd or '.'}"


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    """Runs an order and returns the fields of its Outcome."""
    if order.get("protocol") != PROTOCOL:
        raise DetError(
            f"this version of det-lightning speaks protocol {PROTOCOL} of replays, the caller {order.get('protocol')}; "
            f"install one version on both sides"
        )
    folder = Path(order["folder"])
    capture = {int(rank): tuple(indices) for rank, indices in order["capture"].items()}
    recording = Recording(step=order["step"], folder=folder, capture=capture)
    with LedgerReader(order["ledger"]) as reference:
        first = reference.first_step or 0
        plan: ReplayPlan = plan_replay(
            reference,
            folder / "ledger",
            start=max(first, recording.step - 1),
            stop=recording.step,
            world=order["world"],
            accumulate=order["accumulate"],
            entry=order["entry"],
            recording=recording,
            checkpoint=None if order["checkpoint"] is None else Path(order["checkpoint"]),
        )
        run_plan(plan)
        with LedgerReader(plan.out) as again:
            return asdict(_outcome(reference, again, recording.step))


def _outcome(reference: LedgerReader, again: LedgerReader, step: int) -> Outcome:
    """The replay ends itself at the first record that differs, so its last record says all."""
    last = again.last_step
    if last is None:
        raise DetError(f"the replay of {reference.path} ran no step; its entry may end before step {step}")
    last = min(last, step)  # with several optimizers a batch may go beyond the step
    record, own = again.record(last), reference.record(last)
    difference = difference_at(reference, again, last)
    differs = [each.name for each in (*difference.fields, *difference.roots) if not each.one_sided]
    return Outcome(
        reached=last == step and (last == again.first_step or _agrees(reference, again, last - 1)),
        reproduced=last == step and record.trace == own.trace,
        step=last,
        differs=differs,
        trace=record.trace,
        roots=dict(record.agree["roots"]),
    )


def _agrees(reference: LedgerReader, again: LedgerReader, step: int) -> bool:
    return reference.record(step).trace == again.record(step).trace


def main() -> int:
    """Answers one order a line from standard input, until it ends; what the run prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = carry_out(json.loads(line))
        except BaseException as error:
            answer = {"error": last_words(error), "traceback": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
