"""Finds random draws while samples are loaded: what they give depends on world size, workers and where a run resumed.

Looks at the global generators of torch, NumPy and Python. A generator that a data set seeds from the sample's index is
its own and is not concerned.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from det_lightning.errors import UncoveredError
from det_lightning.kernels.dispatch import unrecorded

_ON_THE_CUT = (
    "depend on the rank and on the cut. Draw with det_lightning.random, for example det_lightning.random.randn_like(x), x a "
    "tensor with the samples in dimension 0, or in the data set."
)
_ON_THE_RESUME = (
    "depend on where the run was resumed. Draw from a generator of its own: "
    "torch.Generator().manual_seed(trainer.global_step)."
)

State = dict[str, object]
_after_last_batch: State = {}  # of this worker process


def states() -> State:
    """A value for each global generator that changes when it is drawn from."""
    numpy_state = np.random.get_state(legacy=False)
    with unrecorded():
        torch_state = torch.random.get_rng_state().numpy().tobytes()
    return {
        "torch": torch_state,
        "numpy.random": (numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["state"]["key"].tobytes()),
        "random": random.getstate(),
    }


def _moved_since(before: State) -> list[str]:
    """The generators that were drawn from since."""
    now = states()
    return [name for name, state in before.items() if now[name] != state]


def check(before: State) -> None:
    """Raises UncoveredError if a generator was drawn from since, while a batch was loaded."""
    moved = _moved_since(before)
    if moved:
        raise UncoveredError(
            f"loading a training batch drew from the global generator of {' and '.join(moved)}. What is drawn would "
            f"depend on the world size, on num_workers and on where the run was resumed. In __getitem__, draw from a "
            f"generator of its own for each sample, seeded with its index: torch.Generator().manual_seed(index)."
        )


def refuse_draws(before: State, when: str, why: str = _ON_THE_CUT) -> None:
    """Raises UncoveredError if a generator was drawn from since, by code that every rank runs for each micro-batch unless
    `why` says otherwise.

    Args:
        when: for the message, such as "in training_step".
        why: what its numbers depend on, and what to write instead.
    """
    moved = _moved_since(before)
    if moved:
        raise UncoveredError(
            f"{when} the global generator of {' and '.join(moved)} was drawn from, whose numbers {why}"
        )


@contextmanager
def no_draws(when: str, why: str = _ON_THE_CUT) -> Iterator[None]:
    """Around code that draws from no global generator; errors as for `refuse_draws`, and one of the code itself as it is."""
    before = states()
    yield
    refuse_draws(before, when, why)


def no_draws_of_step(when: str) -> AbstractContextManager[None]:
    """The same, of code that runs once a step: it draws alike on all ranks, but checkpoints hold no generator's state."""
    return no_draws(when, _ON_THE_RESUME)


def guarded(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; checks what is loaded in this process."""
    while True:
        before = states()
        try:
            batch = next(batches)
        except StopIteration:
            return
        check(before)
        yield batch


class GuardedCollate:
    """A collate function that checks, in a worker process, what was drawn since the batch before."""

    def __init__(self, collate: Callable[[list], Any]):
        self.collate = collate

    def __call__(self, samples: list) -> Any:
        batch = self.collate(samples)
        if get_worker_info() is not None:
            check(_after_last_batch)
        return batch


class GuardedStart:
    """A worker_init_fn that notes the state in which a worker begins."""

    def __init__(self, start: Callable[[int], None] | None):
        self.start = start

    def __call__(self, worker_id: int) -> None:
        if self.start is not None:
            self.start(worker_id)
        _after_last_batch.update(states())
