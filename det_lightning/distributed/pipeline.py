"""Exchanges in flight: the collectives of several buckets, started in one order on every rank.

A step of the pipeline resumes every exchange in flight once, oldest first. Steps are taken when a bucket is launched and
at the end; buckets are launched in their fixed order. So every rank starts the same collectives in the same order,
whatever its own backward pass does in between. On CUDA the exchanges run on a stream of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from det_lightning.distributed.exchange import Stages
from det_lightning.distributed.waiting import wait


class Pipeline:
    """Runs exchanges beside a backward pass."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flying: list[tuple[Stages, Callable[[torch.Tensor], None], list[Any]]] = []

    def launch(self, exchange: Stages, done: Callable[[torch.Tensor], None]) -> None:
        """Starts an exchange; `done` receives its result."""
        with self._beside():
            self._step()
            self._resume((exchange, done, [None]))

    def finish(self) -> None:
        """Runs all exchanges to their end."""
        with self._beside():
            while self._flying:
                self._step()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def drop(self) -> None:
        """Forgets what is in flight."""
        self._flying = []

    def _step(self) -> None:
        flying, self._flying = self._flying, []
        for each in flying:
            self._resume(each)

    def _resume(self, each: tuple[Stages, Callable[[torch.Tensor], None], list[Any]]) -> None:
        exchange, done, work = each
        wait(work[0])
        try:
            work[0] = next(exchange)
        except StopIteration as end:
            done(end.value)
            return
        self._flying.append(each)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """The exchange's stream waits for what the backward pass has queued so far, and goes its own way from there."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
