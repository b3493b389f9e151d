"""Runs one side of a comparison: in this process, or with another interpreter or in another directory.

Another interpreter gets its order as a file and answers in one: `python -m det_lightning.replay.sides ORDER`.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from det_lightning.errors import DetError
from det_lightning.ledger.compare import difference_at
from det_lightning.ledger.store import LedgerReader
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
    """

    ledger: Path
    entry: str | None = None
    python: str | None = None
    cwd: Path | None = None


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


def run_side(side: Side, recording: Recording, *, world: int | None, accumulate: int | None) -> Outcome:
    """Replays `side` up to the recorded step, with the operations of that step written to the recording's folder.

    Raises:
        DetError: what the replay raised, with its traceback if it ran in another process.
    """
    order = {
        "protocol": PROTOCOL,
        "ledger": str(side.ledger.resolve()),
        "entry": side.entry,
        "step": recording.step,
        "folder": str(recording.folder.resolve()),
        "capture": {str(rank): list(indices) for rank, indices in recording.capture.items()},
        "world": world,
        "accumulate": accumulate,
    }
    recording.folder.mkdir(parents=True, exist_ok=True)
    if side.python is None and side.cwd is None:
        return Outcome(**carry_out(order))
    orders, answers = recording.folder / "order.json", recording.folder / "answer.json"
    orders.write_text(json.dumps(order), encoding="utf-8")
    command = [side.python or sys.executable, "-m", "det_lightning.replay.sides", str(orders.resolve())]
    try:
        done = subprocess.run(command, cwd=side.cwd, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise DetError(f"{command[0]} cannot be started in {side.cwd or '.'}: {error.strerror}") from None
    if done.returncode != 0 or not answers.is_file():
        raise DetError(
            f"the replay of {side.ledger} with {command[0]} in {side.cwd or '.'} ended with exit code {done.returncode} "
            f"(det-lightning must be importable there): {done.stderr.strip()[-_TAIL:]}"
        )
    return Outcome(**json.loads(answers.read_text(encoding="utf-8")))


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
        )
        run_plan(plan)
        with LedgerReader(plan.out) as again:
            return asdict(_outcome(reference, again, recording.step))


def _outcome(reference: LedgerReader, again: LedgerReader, step: int) -> Outcome:
    """The replay ends itself at the first record that differs, so its last record says all."""
    last = again.last_step
    if last is None:
        raise DetError(f"the replay of {reference.path} ran no step; its entry may end before step {step}")
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


def main(arguments: list[str]) -> int:
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answers = Path(order["folder"], "answer.json")
    standard_output, sys.stdout = sys.stdout, sys.stderr
    try:
        answers.write_text(json.dumps(carry_out(order)), encoding="utf-8")
    finally:
        sys.stdout = standard_output
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
