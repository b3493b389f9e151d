"""Logged values added up exactly: Lightning's own store adds them in float32 on every rank, so that the last bits of an
epoch's mean would depend on the split, and a scheduler that acts on it as well.

A value that is made of means of items (`LossTerms`) is logged with its items' exact sums and counts; any other is one
item, as heavy as its batch. A step's value is the one over the global batch; an epoch's over all items of the epoch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from det_lightning.distributed.waiting import other_ranks
from det_lightning.errors import InputError
from det_lightning.layers.loss_calls import count_digits
from det_lightning.layers.loss_plan import Mean
from det_lightning.ops.digits import normalise_digits
from det_lightning.ops.means import item_digits, quotient_of


@dataclass(frozen=True)
class Logged:
    """How a value is being logged.

    Attributes:
        means: what it is made of, or None.
        evaluate: (value of each mean) -> the value.
        window: equal for all micro-batches of one step, and unlike another's.
        weightless: the micro-batch stands in for an empty slice.
    """

    means: list[Mean] | None
    evaluate: Callable[[list[Tensor]], Tensor] | None
    window: object
    weightless: bool


_now: ContextVar[Logged | None] = ContextVar("det_lightning_logged", default=None)


@contextmanager
def logging(logged: Logged) -> Iterator[None]:
    """Within, a value handed to Lightning's store is this one."""
    token = _now.set(logged)
    try:
        yield
    finally:
        _now.reset(token)


class Sums:
    """Exact sums and denominators of the means that a logged value is made of; integers, on the CPU."""

    def __init__(self):
        self.integers: Tensor | None = None  # int64 [means, 2, NB]
        self.totals: list[bool] = []
        self.evaluate: Callable[[list[Tensor]], Tensor] = _first
        self.windows = 0

    def add(self, name: str, parts: Tensor, totals: list[bool], evaluate: Callable[[list[Tensor]], Tensor]) -> None:
        """parts: int64 [means, 2, NB]. Raises InputError if the value was made of other means before."""
        if self.integers is None:
            self.integers = torch.zeros_like(parts)
        elif self.integers.shape != parts.shape or (self.totals and self.totals != totals):
            raise InputError(
                f"self.log({name!r}, ...) was called with a value made of {len(self.integers)} means before, and of "
                f"{len(parts)} now. Log unlike values by names of their own."
            )
        self.integers = normalise_digits(self.integers + parts)
        self.totals, self.evaluate = totals, evaluate

    def value(self, *, add_over: Any, synchronise: bool, total: bool) -> Tensor | None:
        """The value, float32 without dimensions; None if nothing counted.

        Args:
            add_over: process group.
            synchronise: add over its ranks.
            total: a sum is asked for: sums are not divided by the number of steps.
        """
        integers = _added(self.integers, add_over) if synchronise else self.integers
        if not integers[:, 1].any():
            return None
        over = count_digits(1 if total else max(self.windows, 1))
        return self.evaluate(
            [quotient_of(n, over if whole else d) for (n, d), whole in zip(integers, self.totals, strict=True)]
        )


def _added(integers: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a process group, on the CPU."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return integers
    moved = integers.cuda() if dist.get_backend(group) == "nccl" else integers.clone()
    with other_ranks("logged values were added up over the ranks"):
        dist.all_reduce(moved, group=group)
    return moved.cpu()


def _first(means: list[Tensor]) -> Tensor:
    return means[0]


class ExactMetric:
    """Mixed in before Lightning's store of one logged value."""

    _epoch: Sums | None = None
    _step: Sums | None = None
    _window: object = None
    _last: Tensor | None = None
    _marked: tuple[Tensor, int] | None = None  # the epoch's sums, or a maximum, before the step that is under way

    def update(self, value: Any, batch_size: int) -> None:
        summed = self.meta.is_sum_reduction if self.is_tensor else False
        if not self.is_tensor or not (summed or self.meta.is_mean_reduction) or value.dtype is torch.float64:
            super().update(value, batch_size)
            return
        logged = _now.get() or Logged(None, None, object(), False)
        parts, totals, evaluate = _parts_of(logged, value, batch_size, summed)
        if self._epoch is None:
            self._epoch = Sums()
        if self._step is None or logged.window != self._window:
            self._step, self._window = Sums(), logged.window
            self._epoch.windows += 1
            self._step.windows = 1
        self._last = value.detach().to(torch.float32)
        self._step.add(self.meta.name, parts, totals, evaluate)
        self._epoch.add(self.meta.name, parts, totals, evaluate)
        if self.meta.on_step:
            self._forward_cache = self._value_of(self._step, summed)
        if not self.meta.on_epoch:
            self.value = self._forward_cache

    def compute(self) -> Tensor:
        if self._epoch is None or self._epoch.integers is None:
            return super().compute()
        return self._value_of(self._epoch, self.meta.is_sum_reduction)

    def reset(self) -> None:
        super().reset()
        self._epoch = self._step = self._last = self._window = self._marked = None

    def mark(self) -> None:
        """A step begins: `so_far(within=True)` will be what the epoch holds now."""
        self._marked = self.so_far(within=False)

    def so_far(self, *, within: bool) -> tuple[Tensor, int] | None:
        """(int64 [means, 2, NB] of this rank, steps) of the epoch; for a maximum or minimum (float [1], 0); None if there is
        nothing yet.

        Args:
            within: without the step that is under way.
        """
        if within:
            return self._marked
        if self.is_tensor and (self.meta.is_max_reduction or self.meta.is_min_reduction):
            return self.value.detach().clone().reshape(1), 0
        if self._epoch is None or self._epoch.integers is None:
            return None
        return self._epoch.integers.clone(), self._epoch.windows

    def _value_of(self, sums: Sums, summed: bool) -> Tensor:
        sync = self.meta.sync
        value = sums.value(
            add_over=sync.group,
            synchronise=sync.should and not sync.rank_zero_only,
            total=summed,
        )
        if value is None:
            value = torch.zeros((), dtype=torch.float32) if summed else self._last
        return value.to(self._last.device)


def _parts_of(
    logged: Logged, value: Tensor, batch_size: int, summed: bool
) -> tuple[Tensor, list[bool], Callable[[list[Tensor]], Tensor]]:
    """(int64 [means, 2, NB] of one micro-batch, which are sums, how the value is made of them)."""
    means = logged.means
    if means and summed and not all(mean.total for mean in means):
        means = None
    if means and not (isinstance(logged.window, tuple) or summed) and any(mean.total for mean in means):
        means = None  # outside training there are no steps to divide a sum by
    if not means:
        weight = 0 if logged.weightless else 1 if summed else int(batch_size)
        digits = item_digits(value.detach().float().reshape(1)).cpu() * (weight if not summed else min(weight, 1))
        return torch.stack([digits, count_digits(weight)]).unsqueeze(0), [summed], _first
    parts = torch.stack([torch.stack([mean.digits, mean.denominator]) for mean in means])
    return parts * (0 if logged.weightless else 1), [mean.total for mean in means], logged.evaluate


class ExactCollection:
    """Mixed in before Lightning's collection of logged values: what is put in adds up exactly.

    Attributes:
        resumed: sums by key that a checkpoint carried, for values that are logged again.
    """

    resumed: dict[str, tuple[Tensor, int]] | None = None

    def __setitem__(self, key: str, metric: Any) -> None:
        if getattr(metric, "is_tensor", False) and not isinstance(metric, ExactMetric):
            metric.__class__ = exact = exact_class(type(metric), ExactMetric)
            # The constructor bound both to the stock class.
            metric.update = metric._wrap_update(exact.update.__get__(metric))
            metric.compute = metric._wrap_compute(exact.compute.__get__(metric))
            found = (self.resumed or {}).pop(key, None)
            if found is not None and found[0].is_floating_point():  # a maximum or a minimum
                metric.value = found[0].reshape(())
            elif found is not None:
                metric._epoch = Sums()
                metric._epoch.integers, metric._epoch.windows = found[0].clone(), found[1]
        super().__setitem__(key, metric)

    def mark(self) -> None:
        """See `ExactMetric.mark`."""
        for metric in self.values():
            if isinstance(metric, ExactMetric):
                metric.mark()

    def sums(self, *, within: bool = False) -> dict[str, tuple[Tensor, int]]:
        """key -> `ExactMetric.so_far`, over all ranks, of every value whose epoch is under way."""
        found = {}
        for key, metric in self.items():
            here = metric.so_far(within=within) if isinstance(metric, ExactMetric) else None
            if here is None:
                continue
            values, windows = here
            if values.is_floating_point():
                found[key] = (metric.meta.sync(values.reshape(())).reshape(1).cpu(), 0)
            else:
                found[key] = (normalise_digits(_added(values, None) if metric.meta.sync.should else values), windows)
        return found


@cache
def exact_class(stock: type, mixin: type) -> type:
    """The class `stock` with `mixin` in front of it."""
    return type(f"Exact{stock.__name__.lstrip('_')}", (mixin, stock), {})


def make_exact(collection: Any) -> None:
    """Turns one of Lightning's collections of logged values into one that adds up exactly."""
    if not isinstance(collection, ExactCollection):
        collection.__class__ = exact_class(type(collection), ExactCollection)


def make_stock(collection: Any) -> None:
    """Undoes `make_exact`."""
    if isinstance(collection, ExactCollection):
        collection.__class__ = type(collection).__mro__[2]
        collection.clear()
