"""Which of the checkpoints that a ledger names can still be started from, and what that means for samples of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from det_lightning.ledger.reader import Checkpoint, LedgerReader


def nearest_checkpoint(reference: LedgerReader, step: int) -> Checkpoint | None:
    """The last recorded checkpoint at or before `step` whose file is still what was recorded, and from which a run goes on
    as if it had not stopped."""
    here = (each for each in reference.checkpoints() if each.step <= step and not _is_before_schedule(reference, each))
    found = sorted(here, key=lambda each: each.step)
    return next((each for each in reversed(found) if _is_whole(each)), None)


def replay_ranges(reference: LedgerReader, steps: Sequence[int]) -> list[tuple[int, int]]:
    """(after, up to) of the replays that run all of `steps` (rising) again: one for each checkpoint that is nearest to
    some of them, so that no step is run twice.
    """
    ranges: dict[int | None, tuple[int, int]] = {}
    for step in steps:
        nearest = nearest_checkpoint(reference, step - 1)
        begin = None if nearest is None else nearest.step
        ranges[begin] = (ranges[begin][0] if begin in ranges else step - 1, step)
    return list(ranges.values())


def _is_before_schedule(reference: LedgerReader, checkpoint: Checkpoint) -> bool:
    """At the end of an epoch Lightning saves before a schedule that follows a monitored value has looked at that epoch, and
    a resumed run leaves the look out."""
    recipe = reference.recipe
    schedulers, data = recipe.get("schedulers"), recipe.get("data")
    steps = data.get("steps_per_epoch") if isinstance(data, dict) else None
    if type(steps) is not int or steps < 1 or checkpoint.step % steps:
        return False
    return isinstance(schedulers, list) and any(isinstance(each, dict) and "monitor" in each for each in schedulers)


def _is_whole(checkpoint: Checkpoint) -> bool:
    path = Path(checkpoint.path)
    if not path.is_file():
        return False
    return not checkpoint.digest or blake3().update_mmap(path).hexdigest() == checkpoint.digest
