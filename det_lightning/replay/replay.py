"""Replays a recorded run at any world size and accumulation, and says where it leaves the record."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.compare import Difference, difference_at
from det_lightning.ledger.store import Checkpoint, LedgerReader
from det_lightning.replay.group import worker_group
from det_lightning.replay.run import ReplayPlan, run_rank
from det_lightning.strategies.given_ranks import free_port


@dataclass(frozen=True)
class ReplayResult:
    """The answer of a replay.

    Attributes:
        matched: every compared record agreed.
        first: how the first differing record differs; None if all matched.
        steps: how many optimizer steps were run.
        start: step after which the replay began: 0, or that of the checkpoint it was started from.
    """

    matched: bool
    first: Difference | None
    steps: int
    start: int


def replay(
    path: str | Path,
    *,
    start: int | None = None,
    stop: int | None = None,
    world: int = 1,
    accumulate: int | None = None,
    entry: str | None = None,
    out: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Runs steps (start, stop] of a ledger again and compares each record.

    Args:
        path: the ledger's directory.
        start: compare from the record after this one; the replay begins at the nearest recorded checkpoint at or
            before it, else at the beginning.
        stop: the last step; by default the ledger's last record.
        world: ranks, as processes of this machine.
        accumulate: micro-batches a step; by default as few as the recorded run had in all.
        entry: "package.module:function" instead of the recorded one.
        out: directory for the replay's own ledger; by default it is thrown away.
        progress: called with each finished step (with one rank).

    Raises:
        InputError: the range, the entry or the split is not one that can be replayed.
        LedgerError: the ledger cannot be read or was not recorded under strategy="det".
    """
    with tempfile.TemporaryDirectory(prefix="det-lightning-replay-") as scratch, LedgerReader(path) as reference:
        plan = _plan(reference, start, stop, world, accumulate, entry, Path(out) if out else Path(scratch, "ledger"))
        if plan.world_size == 1:
            run_rank(0, 1, free_port(), plan, progress)
        else:
            with worker_group(plan.world_size) as group:
                group.run(run_rank, plan.world_size, plan)
        with LedgerReader(plan.out) as candidate:
            return _compare(reference, candidate, start)


def tensors_at(path: str | Path, step: int, kind: str = "weights", entry: str | None = None) -> dict[str, np.ndarray]:
    """The tensors of a recorded run after `step`, computed again, with one rank.

    Raises:
        LedgerError: the replay does not reproduce the ledger's record of that step.
        InputError: a kind other than "weights".
    """
    if kind != "weights":
        raise InputError(f"only weights are rebuilt by a replay, not {kind}")
    with tempfile.TemporaryDirectory(prefix="det-lightning-replay-") as scratch, LedgerReader(path) as reference:
        plan = _plan(reference, None, step, 1, None, entry, Path(scratch, "ledger"))
        weights = run_rank(0, 1, free_port(), plan)
        with LedgerReader(plan.out) as candidate:
            result = _compare(reference, candidate, None)
    if not result.matched:
        raise LedgerError(
            f"replaying {path} leaves its record at step {result.first.step}, before step {step} was reached"
        )
    return weights


def _plan(reference, start, stop, world, accumulate, entry, out) -> ReplayPlan:
    if reference.recipe.get("arithmetic") != "det" or not reference.recipe.get("data"):
        raise LedgerError(
            f'{reference.path} was recorded under {reference.recipe.get("arithmetic")!r}; only runs of strategy="det" '
            f"can be replayed to the same bits"
        )
    first, last = reference.first_step, reference.last_step
    start, stop = first if start is None else start, last if stop is None else stop
    if first is None or not first <= start <= stop <= last:
        raise InputError(f"the range {start} to {stop} is not within the ledger's steps {first} to {last}")
    if world < 1 or (accumulate is not None and accumulate < 1):
        raise InputError(f"world and accumulate are at least 1, got {world} and {accumulate}")
    checkpoint = nearest_checkpoint(reference, start)
    if checkpoint is None and first > 0:
        raise LedgerError(f"{reference.path} begins at step {first}, and no checkpoint of it is left to start from")
    splits = reference.environment["world_size"] * reference.environment["accumulate"]
    return ReplayPlan(
        reference=reference.path,
        out=out,
        stop=stop,
        checkpoint=None if checkpoint is None else checkpoint.path,
        world_size=world,
        accumulate=accumulate or -(-splits // world),
        entry=entry,
    )


def nearest_checkpoint(reference: LedgerReader, step: int) -> Checkpoint | None:
    """The last recorded checkpoint at or before `step` whose file is still there."""
    found = [each for each in reference.checkpoints() if each.step <= step and Path(each.path).is_file()]
    return max(found, key=lambda each: each.step, default=None)


def _compare(reference: LedgerReader, candidate: LedgerReader, start: int | None) -> ReplayResult:
    begun = candidate.first_step if candidate.resumed_from is None else candidate.resumed_from["step"]
    first_compared = max(candidate.first_step, begun if start is None else start)
    for step in range(first_compared, candidate.last_step + 1):
        difference = difference_at(reference, candidate, step)
        if difference.found:
            return ReplayResult(False, difference, candidate.last_step - begun, begun)
    return ReplayResult(True, None, candidate.last_step - begun, begun)
