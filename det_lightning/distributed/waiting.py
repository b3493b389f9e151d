"""Waiting for other ranks, with a message that says what a failure means."""

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from det_lightning.errors import LostRankError

_LAST_SECONDS = 0.2
_OF_GLOO = ("gloo/transport", "timeout caused pair closure")


@contextmanager
def other_ranks(doing: str) -> Iterator[None]:
    """Around collectives and nothing else.

    Raises:
        LostRankError: another rank is gone, or did not come within the process group's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"rank {dist.get_rank()} lost another rank while {doing}; it was killed, stopped with an error of its own, or "
            f"did not come within the timeout. This rank stops too: start the run again from its last checkpoint. "
            f"({str(error).splitlines()[0]})"
        ) from error


def tells_of_another_rank(error: BaseException) -> bool:
    """Whether an error only says that another rank was lost: one of `other_ranks`, or torch's where it stands alone."""
    # Gloo's errors have no class of their own; those after a timeout do not say where they come from.
    of_gloo = isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)
    return of_gloo or isinstance(error, (LostRankError, dist.DistError))


def wait(work: Any) -> None:
    """Until a collective of the reduction of gradients, or every one of a list, is done; None is done.

    Errors as for `other_ranks`.
    """
    if work is None:
        return
    with other_ranks("gradients were added up over the ranks"):
        for each in work if isinstance(work, list) else [work]:
            each.wait()


@cache
def let_go_at_exit() -> None:
    """Before the interpreter ends, gloo's threads get the time to let go of the tensors of the last collectives.

    One that does so while the interpreter is being taken down ends the process with "terminate called without an active
    exception", after a training that was sound (PyTorch's pull request 179291).
    """
    atexit.register(time.sleep, _LAST_SECONDS)
