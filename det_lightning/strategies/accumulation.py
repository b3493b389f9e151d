"""How many micro-batches a step has, epoch by epoch: Trainer(accumulate_grad_batches=...) or Lightning's
GradientAccumulationScheduler. The samples of a step are not its concern: the slices of a global batch are cut anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from det_lightning.errors import InputError


@dataclass(frozen=True)
class Accumulation:
    """Micro-batches of a step.

    Attributes:
        at: of an epoch.
        values: all that occur, in the order of epochs.
    """

    at: Callable[[int], int]
    values: tuple[int, ...]

    def step_size(self, batch_size: int, world_size: int) -> int:
        """The global batch of a loader. Raises InputError if it would change from epoch to epoch."""
        sizes = [batch_size * world_size * value for value in self.values]
        other = next((size for size in sizes if size != sizes[0]), None)
        if other is not None:
            raise InputError(
                f"the GradientAccumulationScheduler would change the global batch from {sizes[0]} samples to {other} "
                f"(world size {world_size} x batch_size {batch_size} x accumulation). The global batch is part of a run's "
                f"recipe: give it, DetStrategy(global_batch={sizes[0]}), and accumulation only cuts it into more "
                f"micro-batches. For larger steps later on, train in several fits, each with its own global_batch."
            )
        return sizes[0]

    def steps_within(self, limit: int | float, steps: int) -> int | None:
        """How many steps an epoch has under Trainer(limit_train_batches=limit); None for all.

        Args:
            limit: a number of micro-batches, or a fraction of the epoch's steps, of which the whole ones are taken.
            steps: of an epoch without a limit.

        Raises:
            InputError: the limit ends an epoch inside a step, or leaves none.
        """
        if isinstance(limit, float):
            if 0.0 < limit < 1.0 and int(steps * limit) == 0:
                raise InputError(f"limit_train_batches={limit} of {steps} optimizer steps is less than one step.")
            return None if limit == 1.0 else int(steps * limit)
        if len(set(self.values)) > 1:
            raise InputError(
                f"limit_train_batches={limit} counts micro-batches, and the GradientAccumulationScheduler changes how many "
                f"make a step, so the epochs would differ in length. Pass a fraction, or Trainer(max_steps=...)."
            )
        if limit % self.values[0]:
            raise InputError(
                f"limit_train_batches={limit} ends an epoch inside an optimizer step of {self.values[0]} micro-batches: "
                f"pass a multiple of accumulate_grad_batches, a fraction of the epoch's steps, or max_steps."
            )
        return limit // self.values[0]


def accumulation_of(trainer: Any) -> Accumulation:
    """What a Trainer accumulates; it need not have begun."""
    for callback in trainer.callbacks:
        if any(base.__name__ == "GradientAccumulationScheduler" for base in type(callback).__mro__):
            at = callback.get_accumulate_grad_batches
            return Accumulation(at, tuple(at(epoch) for epoch in callback.epochs))
    fixed = trainer.accumulate_grad_batches
    return Accumulation(lambda epoch: fixed, (fixed,))


def follow(trainer: Any, batches: int, accumulate: int) -> None:
    """Tells Lightning how many micro-batches the epoch has that begins, which it counted when the loaders were made, and
    lets a validation at a fraction of the epoch come after a whole step, the same one at every accumulation.
    """
    loop = trainer.fit_loop
    loop._combined_loader.limits = [batches]
    loop.max_batches = batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(batches // accumulate * trainer.val_check_interval)) * accumulate
