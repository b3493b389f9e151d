"""What a checkpoint says of the run's order, and how a resumed run takes it over at another split."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from det_lightning.distributed.sample_order import SampleOrder
from det_lightning.errors import InputError
from det_lightning.strategies.plateau import KEY as PLATEAU

KEY = "det_lightning"
LOGGED = "logged"
"""Sums of logged values whose epoch was under way: {"epoch", "step", "sums": {key: [int64 [means, 2, NB], steps]}}."""
_TRACKERS = ("ready", "started", "processed", "completed")


@dataclass(frozen=True)
class Stamp:
    """The part of the recipe that decides which samples come next.

    Attributes:
        accumulate: micro-batches of a step of the run that saved it.
        listing: digest of what the user's own sampler listed for the first epoch.
    """

    samples: int
    global_batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    steps_per_epoch: int
    accumulate: int
    listing: str | None = None

    def check(self, order: SampleOrder) -> None:
        """Raises InputError with both values unless `order` continues the run of this checkpoint."""
        for name, given in lasting(order).items():
            saved = getattr(self, name)
            if saved != given:
                hint = (
                    "Global batch = world size x batch_size x accumulate_grad_batches, or DetStrategy(global_batch=...)."
                    if name == "global_batch"
                    else "Resume with the data set, DataLoader, limit_train_batches and seed of the run that saved it."
                )
                raise InputError(f"the checkpoint was saved with {name} = {saved}, this run has {given}. {hint}")


def stamp(order: SampleOrder, accumulate: int) -> dict[str, int | bool]:
    """Plain values for the checkpoint, so that it loads with weights_only=True."""
    return {**lasting(order), "accumulate": accumulate}


def lasting(order: SampleOrder) -> dict[str, int | bool]:
    """What decides the samples of a step; how they are arranged within it does not."""
    names = ("samples", "global_batch", "seed", "shuffle", "drop_last")
    listing = getattr(order, "listing", None)
    listed = {} if listing is None else {"listing": listing.digest(0)}
    return {**{name: getattr(order, name) for name in names}, "steps_per_epoch": order.steps, **listed}


def take_over(checkpoint: dict[str, Any], accumulate: Callable[[int], int], *, by_steps: bool) -> Stamp | None:
    """Rewrites Lightning's progress, which counts micro-batches, to this run's accumulation.

    Args:
        accumulate: micro-batches of a step, by epoch.
        by_steps: the resumed run has a limit of steps (Trainer(max_steps=...)).

    Returns:
        The checkpoint's stamp, or None for one saved by another strategy at an epoch's boundary.

    Raises:
        InputError: another strategy saved it within an epoch, or the stamp is not sound.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    saved = checkpoint.get(KEY)
    if progress is not None and by_steps:
        _begin_next_epoch(checkpoint["loops"]["fit_loop"])
    if saved is None:
        if progress is not None and progress["current"]["ready"] and not progress["is_last_batch"]:
            raise InputError(
                f"this checkpoint was saved within an epoch by another strategy (it has no {KEY!r} entry), so which "
                f"samples are left cannot be known. Load its weights only, or save at the end of an epoch."
            )
        return None
    saved = {name: value for name, value in saved.items() if name not in (LOGGED, PLATEAU)}
    try:
        resumed = Stamp(**saved)
    except TypeError as error:
        raise InputError(f"the checkpoint's {KEY!r} entry is not one that this version writes: {error}") from error
    if progress is not None:
        by_hand = checkpoint["loops"]["fit_loop"]["epoch_loop.manual_optimization.optim_step_progress"]
        if not by_hand["total"]["completed"]:  # there a batch makes as many steps as it likes, and nothing accumulates
            _rescale(progress, resumed, accumulate, checkpoint["global_step"])
        _reopen_epoch(checkpoint)
    return resumed


def _rescale(progress: dict[str, Any], saved: Stamp, accumulate: Callable[[int], int], steps_done: int) -> None:
    """Batches of this epoch, and of all before it, as this run would have counted them."""
    ready = progress["current"]["ready"]
    if ready % saved.accumulate:
        raise InputError(
            f"the checkpoint stands at micro-batch {ready}, inside an optimizer step of "
            f"{saved.accumulate} micro-batches; resume from one saved after a whole step."
        )
    steps = ready // saved.accumulate
    epoch = max(steps_done - steps, 0) // max(saved.steps_per_epoch, 1)
    current = steps * accumulate(epoch)
    before = progress["total"]["ready"] - ready
    if before:  # each epoch with its own
        before = sum(saved.steps_per_epoch * accumulate(past) for past in range(epoch))
    for name, scaled in (("current", current), ("total", before + current)):
        count = progress[name]
        count.update({tracker: scaled - (count["ready"] - count[tracker]) for tracker in _TRACKERS})


def within_step(checkpoint: dict[str, Any], accumulate: int) -> bool:
    """Whether some but not all micro-batches of a step have been begun."""
    if "loops" not in checkpoint:
        return False
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] % accumulate != 0


def back_to_whole_step(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Within a step: the checkpoint stands before that step, which a resumed run takes anew."""
    if "loops" not in checkpoint:  # weights only
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    begun = progress["current"]["completed"] % accumulate
    for count in (progress["current"], progress["total"]):
        count.update(dict.fromkeys(_TRACKERS, count["completed"] - begun))
    progress["is_last_batch"] = False


def _begin_next_epoch(loop: dict[str, Any]) -> None:
    """A run with a limit of steps that resumes from a finished epoch would go through that epoch once more, without a
    batch, and count it twice: it is to resume from the start of the next one."""
    progress, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    if progress["is_last_batch"] and epochs["current"]["processed"] == epochs["current"]["ready"]:
        for count in (epochs["current"], epochs["total"]):
            count.update(ready=count["ready"] + 1, completed=count["processed"])
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False


def _reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """A fit that ends within an epoch (max_steps) counts that epoch as processed; the resumed run goes on in it."""
    loop = checkpoint["loops"]["fit_loop"]
    if loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    for count in (loop["epoch_progress"]["current"], loop["epoch_progress"]["total"]):
        if count["processed"] == count["ready"]:
            count.update(processed=count["ready"] - 1, completed=count["ready"] - 1)
