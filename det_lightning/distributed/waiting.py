"""Waiting for a collective, with a message that says what a failure means."""

from typing import Any

import torch.distributed as dist

from det_lightning.errors import DetError


def wait(work: Any) -> None:
    """Until the work, or every one of a list, is done; None is done.

    Raises:
        DetError: another rank is gone, or did not come within the process group's timeout.
    """
    if work is None:
        return
    try:
        for each in work if isinstance(work, list) else [work]:
            each.wait()
    except RuntimeError as error:
        raise DetError(
            f"rank {dist.get_rank()} lost another rank while gradients were added up over the ranks; it was killed, "
            f"stopped with an error of its own, or did not come within the timeout. This rank stops too, before the step "
            f"changed a weight: start the run again from its last checkpoint. ({str(error).splitlines()[0]})"
        ) from error
