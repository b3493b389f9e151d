"""Metrics of torchmetrics whose states add floats: made to add exactly, so that their values do not depend on the split.

A float state that is a sum gets a second state beside it, the digits of the exact sum: int64, added up like any integer
state by torchmetrics' own synchronisation, reset, cache and merge. An update runs sample by sample, each on a state of zero,
and what it left there is added to the digits; a value is computed from the rounded digits.

A metric of torchmetrics that keeps the samples holds them in the order of micro-batches and ranks; its value is computed
from them in one order, see kept_samples.py.
"""

import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from det_lightning.arithmetic.formats import NB
from det_lightning.kernels.dispatch import FLOAT_DTYPES
from det_lightning.layers.function_mode import FunctionMode
from det_lightning.ops.digits import det_finalize, normalise_digits
from det_lightning.ops.reduction import det_sum_partial
from det_lightning.strategies.exact_results import exact_class
from det_lightning.strategies.kept_samples import computed_in_one_order, kept_samples

_DIGITS = "_digits"
_EXACT_OF_FLOATS = (dim_zero_max, dim_zero_min, dim_zero_cat)


class ExactStates:
    """In front of the class of a metric; see the module's head."""

    _float_sums: tuple[str, ...]
    _kept: tuple[str, ...]

    def update(self, *args: Any, **kwargs: Any) -> None:
        if not self._float_sums:
            super().update(*args, **kwargs)
            return
        with torch._C.DisableTorchFunction():  # what a metric does is no part of the loss
            totals = {name: getattr(self, name + _DIGITS) for name in self._float_sums}
            for some_args, some_kwargs in _samples(args, kwargs):
                for name, total in totals.items():
                    setattr(self, name, torch.zeros_like(getattr(self, name)).view(total.shape[:-1]))
                super().update(*some_args, **some_kwargs)
                for name in totals:
                    totals[name] = totals[name] + det_sum_partial(getattr(self, name).detach().unsqueeze(-1), dim=-1)
            for name, total in totals.items():
                setattr(self, name + _DIGITS, normalise_digits(total))
            self._round()

    def compute(self) -> Any:
        with torch._C.DisableTorchFunction():
            self._round()
        states = [getattr(self, name) for name in self._float_sums]
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, FunctionMode) and mode.strict:
                mode.terms.note_statistics(states)  # they may be logged, and may not enter the loss
        return computed_in_one_order(self, self._kept, super().compute)

    def _round(self) -> None:
        for name in self._float_sums:
            setattr(self, name, det_finalize(getattr(self, name + _DIGITS), dtype=self._defaults[name].dtype))


def make_metrics_exact(module: nn.Module) -> None:
    """Every metric of the module; warns of those whose values depend on the split in their last bits."""
    wrapped = {
        id(each) for wrapper in module.modules() if isinstance(wrapper, WrapperMetric) for each in wrapper.modules()
    }
    for path, metric in module.named_modules():
        if not isinstance(metric, Metric) or isinstance(metric, ExactStates):
            continue
        states = {name: value for name, value in metric._defaults.items() if isinstance(value, Tensor)}
        floats = [name for name, value in states.items() if value.is_floating_point()]
        sums = tuple(name for name in floats if metric._reductions[name] is dim_zero_sum)
        known = all(states[name].dtype in FLOAT_DTYPES and not states[name].any() for name in sums)
        others = [name for name in floats if name not in sums and metric._reductions[name] not in _EXACT_OF_FLOATS]
        if others or (sums and (not known or id(metric) in wrapped)):
            warnings.warn(
                f"the metric {path} ({type(metric).__name__}) adds floats in its states {', '.join(others or sums)} in a "
                f'way that strategy="det" does not know: the last bits of its value depend on how the samples are split. '
                f"Values logged with self.log(..., sync_dist=True) do not.",
                stacklevel=2,
            )
        elif sums or (kept := kept_samples(metric)):
            _make_exact(metric, sums, () if sums else kept)


def _make_exact(metric: Metric, sums: tuple[str, ...], kept: tuple[str, ...]) -> None:
    metric._float_sums, metric._kept = sums, kept
    for name in sums:
        digits = torch.zeros((*metric._defaults[name].shape, NB), dtype=torch.int64, device=metric.device)
        metric.add_state(name + _DIGITS, digits, dist_reduce_fx="sum")
        state = getattr(metric, name)
        setattr(metric, name + _DIGITS, det_sum_partial(state.detach().unsqueeze(-1), dim=-1))
    metric.__class__ = exact_class(type(metric), ExactStates)
    _wrap(metric)


def make_metrics_stock(module: nn.Module) -> None:
    """Undoes `make_metrics_exact`; states keep the rounded values."""
    for metric in module.modules():
        if isinstance(metric, ExactStates):
            for name in metric._float_sums:
                for states in (metric._defaults, metric._persistent, metric._reductions, metric.__dict__):
                    states.pop(name + _DIGITS, None)
            metric.__class__ = type(metric).__mro__[2]
            del metric._float_sums, metric._kept
            _wrap(metric)


def _wrap(metric: Metric) -> None:
    """As the constructor does: the methods of the class behind those that count, cache and synchronise."""
    metric.update = metric._wrap_update(MethodType(type(metric).update, metric))
    metric.compute = metric._wrap_compute(MethodType(type(metric).compute, metric))


def _samples(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """The arguments of one sample at a time; all at once where not every tensor holds as many samples in dimension 0."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()]
    counts = {len(each) for each in tensors}
    if len(counts) != 1 or counts == {0}:
        yield args, kwargs
        return

    def sample(value: Any, place: int) -> Any:
        return value[place : place + 1] if isinstance(value, Tensor) and value.dim() else value

    for place in range(counts.pop()):
        yield tuple(sample(each, place) for each in args), {name: sample(each, place) for name, each in kwargs.items()}
