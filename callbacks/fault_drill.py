"""What a drill showed: whether a planted fault was found, could not be seen by anything, or was missed."""

import os
from typing import Literal

from det_lightning.callbacks.fault_injector import FaultInjector

from det_lightning.errors import FaultError, InputError
from det_lightning.ledger.store import LedgerReader


def drill_outcome(
    injector: FaultInjector, error: FaultError | None, clean: str | os.PathLike, drilled: str | os.PathLike
) -> Literal["found", "masked", "missed"]:
    """The outcome of a training in which `injector` flipped a bit.

    "found": a guard raised `error`. "masked": nobody did, and no record of the drilled run differs from the clean one's: the
    flip had no effect that could be seen, as behind a zero. "missed": the run went on with other values.

    Args:
        error: what a FaultGuard raised, or None.
        clean, drilled: ledgers of the same training without and with the injector, both with all kinds of tensors.

    Raises:
        InputError: nothing was flipped, so the drill shows nothing.
    """
    if not injector.flips:
        raise InputError(
            f"nothing was flipped: the training never came to step {injector.step}, or no {injector.kind} of "
            f"{injector.parameter} was met in it; the drill shows nothing"
        )
    if error is not None:
        return "found"
    with LedgerReader(clean) as one, LedgerReader(drilled) as other:
        last = min(one.last_step, other.last_step)
        return "masked" if one.record(last).trace == other.record(last).trace else "missed"
