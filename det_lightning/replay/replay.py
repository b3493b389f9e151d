"""Replays a recorded run at any world size and accumulation, and says where it leaves the record."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.compare import Difference, difference_at
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.group import worker_group
from det_lightning.replay.plan import plan_replay
from det_lightning.replay.run import ReplayPlan, run_rank
from det_lightning.replay.settings import recorded_threads
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
    world: int | None = 1,
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
        world: ranks, as processes of this machine; None for as many as were recorded.
        accumulate: micro-batches a step; by default as few as the recorded run had in all.
        entry: "package.module:function" instead of the recorded one.
        out: directory for the replay's own ledger; by default it is thrown away.
        progress: called with each finished step (with one rank).

    Raises:
        InputError: the range, the entry or the split is not one that can be replayed.
        LedgerError: the ledger cannot be read or its run is of a kind that cannot be replayed.
    """
    with tempfile.TemporaryDirectory(prefix="det-lightning-replay-") as scratch, LedgerReader(path) as reference:
        plan = plan_replay(
            reference,
            Path(out) if out else Path(scratch, "ledger"),
            start=start,
            stop=stop,
            world=world,
            accumulate=accumulate,
            entry=entry,
        )
        run_plan(plan, progress)
        with LedgerReader(plan.out) as candidate:
            return _compare(reference, candidate, start)


def tensors_at(path: str | Path, step: int, kind: str = "weights", entry: str | None = None) -> dict[str, np.ndarray]:
    """The tensors of a recorded run after `step`, computed again: with one rank, or as recorded where bits hold there only.

    Raises:
        LedgerError: the replay does not reproduce the ledger's record of that step.
        InputError: a kind other than "weights".
    """
    if kind != "weights":
        raise InputError(f"only weights are rebuilt by a replay, not {kind}")
    with tempfile.TemporaryDirectory(prefix="det-lightning-replay-") as scratch, LedgerReader(path) as reference:
        start = max(step - 1, reference.first_step or 0)
        world = 1 if reference.recipe.get("arithmetic") == "det" else None  # else its bits hold as it was recorded
        plan = plan_replay(reference, Path(scratch, "ledger"), start=start, stop=step, world=world, entry=entry)
        weights = run_plan(plan)
        with LedgerReader(plan.out) as candidate:
            result = _compare(reference, candidate, None)
    if not result.matched:
        raise LedgerError(
            f"replaying {path} leaves its record at step {result.first.step}, before step {step} was reached"
        )
    return weights


def run_plan(plan: ReplayPlan, progress: Callable[[int], None] | None = None) -> dict[str, np.ndarray]:
    """Run it: in this process with one rank, else in a group of its own. Returns the weights of rank 0."""
    if plan.world_size == 1:
        return run_rank(0, 1, free_port(), plan, progress)
    threads = recorded_threads(plan.recipe, plan.environment) or 1
    with worker_group(plan.world_size, on_gpus=plan.accelerator == "gpu", threads=threads) as group:
        return group.run(run_rank, plan.world_size, plan)


def _compare(reference: LedgerReader, candidate: LedgerReader, start: int | None) -> ReplayResult:
    begun = candidate.first_step if candidate.resumed_from is None else candidate.resumed_from["step"]
    first_compared = max(candidate.first_step, begun if start is None else start)
    # With several optimizers a batch may go beyond the step that was asked for.
    for step in range(first_compared, min(candidate.last_step, reference.last_step) + 1):
        difference = difference_at(reference, candidate, step, last_match=step - 1 if step > first_compared else None)
        if difference.found:
            return ReplayResult(False, difference, candidate.last_step - begun, begun)
    return ReplayResult(True, None, candidate.last_step - begun, begun)
