"""Schedules that follow a logged value (ReduceLROnPlateau) look at a step or an epoch behind the hooks in which checkpoints
are saved: a run that is resumed from its end takes the look that is still due.
"""

from collections.abc import Sequence
from typing import Any

from det_lightning.errors import InputError

KEY = "plateau"


def looks_due(trainer: Any) -> list[list]:
    """[place in the Trainer's lr_scheduler_configs, value to look at] of every such schedule whose step or epoch is done and
    that has not looked at it yet. Every rank calls it, for values may be added up over them.
    """
    due = [
        (place, config)
        for place, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau and _is_due(trainer, config)
    ]
    if not due or not trainer.lightning_module.automatic_optimization:
        return []
    # Before the end of a step or an epoch the Trainer's own values may be those of the one before.
    results, values = trainer.fit_loop.epoch_loop._results, dict(trainer.callback_metrics)
    for interval in {config.interval for _, config in due}:
        values |= results.metrics(on_step=interval == "step")["callback"]
    return [[place, float(values[config.monitor])] for place, config in due if config.monitor in values]


def _is_due(trainer: Any, config: Any) -> bool:
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    batches = loop.batch_progress.current
    if not batches.processed == batches.ready > 0:
        return False
    if config.interval == "epoch":
        ended, done = loop._num_ready_batches_reached() and epochs.completed < epochs.ready, trainer.current_epoch + 1
    else:
        under_way = batches.completed < batches.ready or trainer.validating
        ended, done = under_way and not loop._should_accumulate(), loop.batch_idx + 1
    return ended and done % config.frequency == 0


def look(trainer: Any, due: Sequence[Sequence]) -> None:
    """Takes the looks that `looks_due` told.

    Raises:
        InputError: the run has no such schedule.
    """
    for place, value in due:
        configs = trainer.lr_scheduler_configs
        if place >= len(configs) or not configs[place].reduce_on_plateau:
            raise InputError(
                f"the checkpoint was saved before schedule {place} of configure_optimizers, a ReduceLROnPlateau, looked at "
                f"{value}; this run has another one there or none. Resume with the schedules of the run that saved it."
            )
        progress = trainer.fit_loop.epoch_loop.scheduler_progress
        progress.increment_ready()
        trainer.lightning_module.lr_scheduler_step(configs[place].scheduler, value)
        progress.increment_completed()
