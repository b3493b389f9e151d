"""What has to be run again for a question about a ledger: from which state, up to which step, at which split."""

from pathlib import Path

import torch

from det_lightning.errors import InputError, LedgerError
from det_lightning.ledger.kept_checkpoints import nearest_checkpoint
from det_lightning.ledger.record import KINDS
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.run import ReplayPlan
from det_lightning.replay.step_recorder import Recording

MOST_PROCESSES, MOST_MICRO_BATCHES = 256, 1 << 16
_STOCK = ("stock SingleDeviceStrategy", "stock DDPStrategy")


def plan_replay(
    reference: LedgerReader,
    out: Path,
    *,
    start: int | None = None,
    stop: int | None = None,
    world: int | None = None,
    accumulate: int | None = None,
    entry: str | None = None,
    recording: Recording | None = None,
    checkpoint: Path | None = None,
) -> ReplayPlan:
    """The plan to run the steps after `start` up to `stop`, by default all of them, at the recorded split if none is
    given.

    checkpoint: to start from, instead of the nearest that was recorded.

    Raises:
        InputError: the range or the split is not one that can be replayed.
        LedgerError: the run is of a kind that cannot be replayed to the same bits, or its beginning is lost.
    """
    first, last = reference.first_step, reference.last_step
    if first is None:
        raise LedgerError(
            f"{reference.path} holds no record, so there is no step to replay: its run made none, or has not yet"
        )
    start, stop = first if start is None else start, last if stop is None else stop
    if not first <= start <= stop <= last:
        raise InputError(f"the range {start} to {stop} is not within the ledger's steps {first} to {last}")
    if (world is not None and world < 1) or (accumulate is not None and accumulate < 1):
        raise InputError(f"world and accumulate are at least 1, got {world} and {accumulate}")
    recorded = recorded_split(reference)
    if world is None:
        world, accumulate = recorded[0], accumulate or recorded[1]
    accumulate = accumulate or -(-recorded[0] * recorded[1] // world)
    _refuse_other_arithmetic(reference, (world, accumulate) == recorded)
    accelerator = _accelerator(reference, world)
    if checkpoint is None and (nearest := nearest_checkpoint(reference, start)) is not None:
        checkpoint = Path(nearest.path)
    if checkpoint is None and first > 0:
        raise LedgerError(f"{reference.path} begins at step {first}, and no checkpoint of it is left to start from")
    recorded_kinds = reference.record(first).agree["roots"]
    return ReplayPlan(
        reference=reference.path,
        recipe=reference.recipe,
        entry=reference.entry,
        recording_of=reference.environment.get("recording") or {kind: 1 for kind in KINDS if kind in recorded_kinds},
        out=out,
        stop=stop,
        checkpoint=None if checkpoint is None else str(checkpoint),
        accelerator=accelerator,
        world_size=world,
        accumulate=accumulate,
        override=entry,
        recording=recording,
        environment=reference.environment,
    )


def recorded_split(reference: LedgerReader) -> tuple[int, int]:
    """(world size, accumulation) of the recorded run. Raises LedgerError if they are none that can be run here."""
    split = tuple(reference.environment.get(name) for name in ("world_size", "accumulate"))
    if split == (None, None):
        raise LedgerError(
            f"{reference.path} does not say its world size and accumulation, as a PlainLedger does not: only runs of "
            f"Lightning's Trainer can be replayed"
        )
    most = MOST_PROCESSES, MOST_MICRO_BATCHES
    if not all(type(each) is int and 1 <= each <= limit for each, limit in zip(split, most, strict=True)):
        raise LedgerError(
            f"{reference.path} says world size {split[0]!r:.20} and accumulation {split[1]!r:.20}; a replay runs at most "
            f"{most[0]} processes and {most[1]} micro-batches a step"
        )
    return split


def _accelerator(reference: LedgerReader, world: int) -> str:
    """ "gpu" for a run on CUDA where each rank can have a GPU. Runs of strategy="det" have the same bits on the CPU."""
    on_cuda = str(reference.environment.get("device", "")).startswith("cuda")
    gpus = torch.cuda.device_count()
    if on_cuda and gpus >= world:
        return "gpu"
    if on_cuda and reference.recipe.get("arithmetic") != "det":
        raise LedgerError(
            f"{reference.path} was recorded under {reference.recipe.get('arithmetic')!r} on "
            f"{reference.environment['device']!r:.20}; its bits hold there only, and {world} "
            f"rank{'s need' if world > 1 else ' needs'} as many GPUs, of which there are {gpus} here"
        )
    return "cpu"


def _refuse_other_arithmetic(reference: LedgerReader, at_recorded_split: bool) -> None:
    arithmetic = reference.recipe.get("arithmetic")
    if arithmetic == "det" and reference.recipe.get("data"):
        return
    if arithmetic not in _STOCK:
        raise LedgerError(
            f"{reference.path} was recorded under {arithmetic!r}, which cannot be replayed; what can: "
            f'strategy="det", {", ".join(_STOCK)}'
        )
    if not at_recorded_split:
        world, accumulate = recorded_split(reference)
        raise LedgerError(
            f"{reference.path} was recorded under {arithmetic!r}: its bits hold for world size {world} and accumulation "
            f'{accumulate} only (--world {world} --accumulate {accumulate}); a run of strategy="det" can be replayed at any'
        )
