"""Runs the steps between two kept states again, where no ledger recorded them, and writes the ledger that was missing."""

from pathlib import Path
from typing import Any

from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.kept_checkpoints import nearest_checkpoint
from det_lightning.ledger.record import KINDS
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.checkpoint_state import OPTIMIZER, STATE_DICT, load_checkpoint
from det_lightning.replay.plan import recorded_split
from det_lightning.replay.replay import run_plan
from det_lightning.replay.run import ReplayPlan
from det_lightning.replay.saved_run import SavedRun

_STAMP = "det_lightning"  # what strategies/resume.py puts into a checkpoint


def ledger_between(
    run: SavedRun, start: int | None, stop: int, *, entry: str | None, scratch: Path
) -> tuple[Path, Path | None]:
    """Trains from the state after `start` (None: from the beginning) to step `stop` and records it in `scratch`.

    Where no such state was kept, as by a ledger under a stock strategy, it trains from an earlier one or from the beginning.
    Stock Lightning does not continue the order of an epoch from a checkpoint: where the replay misses the kept state, it
    is run from the beginning.

    Returns (the ledger, the checkpoint that its run started from or None).

    Raises:
        InputError: nothing says how the run is built.
        LedgerError: no replay ends in the state that the run kept after `stop`.
    """
    checkpoint = None if start is None else _checkpoint(run, start)
    if run.ledger is None and entry is None:
        raise InputError(
            f"{run.path} does not say how its run is built. Give --entry package.module:function, twice for two versions"
        )
    header = _header(run, checkpoint or run.checkpoints.get(stop))
    begins = [checkpoint] if checkpoint is None or header["recipe"]["arithmetic"] == "det" else [checkpoint, None]
    for number, begin in enumerate(begins):
        out = scratch / f"ledger-{number}"
        plan = ReplayPlan(
            reference=None,
            recording_of=dict.fromkeys(KINDS, 1),
            out=out,
            stop=stop,
            checkpoint=None if begin is None else str(begin),
            world_size=1,
            override=entry,
            **header,
        )
        run_plan(plan)
        wrong = _unlike(run, out, stop)
        if not wrong:
            return out, begin
    raise LedgerError(
        f"replayed from {' and from '.join('the beginning' if begin is None else str(begin) for begin in begins)}, the run "
        f"does not reach the state that {run.path} kept after step {stop} ({', '.join(wrong[:5])} differ): its code, data, "
        f"seed or Trainer arguments are not those that made it"
    )


def _checkpoint(run: SavedRun, step: int) -> Path | None:
    """What can be started from at or before `step`; of a ledger only what still has the recorded digest."""
    if run.ledger is None:
        return run.checkpoints.get(step)
    nearest = nearest_checkpoint(run.ledger, step)
    return None if nearest is None else Path(nearest.path)


def _unlike(run: SavedRun, ledger: Path, step: int) -> list[str]:
    """The weights, buffers and optimizer state after `step` in which the replay is not what the run kept."""
    with LedgerReader(ledger) as again:
        record = again.record(step)
        leaves = again.leaves(record, "weights") | again.leaves(record, "buffers")
        optimizer = again.leaves(record, "optimizer")
    state = run.state(step)
    kept, kept_optimizer = state.tensors[STATE_DICT], state.tensors[OPTIMIZER]
    wrong = sorted(name for name in leaves.keys() & kept.keys() if leaves[name] != kept[name])
    if not state.unnamed_optimizer:
        shared = optimizer.keys() & kept_optimizer.keys()
        return wrong + sorted(name for name in shared if optimizer[name] != kept_optimizer[name])
    unlike = kept_optimizer and sorted(optimizer.values()) != sorted(kept_optimizer.values())
    return wrong + (["the tensors of the optimizer"] if unlike else [])


def _header(run: SavedRun, checkpoint: Path | None) -> dict[str, Any]:
    """Recipe, entry and accumulation: recorded, or as far as a checkpoint tells."""
    if run.ledger is not None:
        world, accumulate = recorded_split(run.ledger)
        recorded = {"recipe": run.ledger.recipe, "entry": run.ledger.entry, "environment": run.ledger.environment}
        return recorded | {"accumulate": world * accumulate}
    stamp = load_checkpoint(checkpoint).get(_STAMP)
    if stamp is None:
        recipe: dict[str, Any] = {"arithmetic": "stock SingleDeviceStrategy", "precision": "32-true", "data": None}
        return {"recipe": recipe, "entry": {}, "accumulate": 1}
    return {"recipe": {"arithmetic": "det", "data": stamp}, "entry": {}, "accumulate": stamp["accumulate"]}
