"""Losses, means and sums of a step: each is recorded with its items, so that it can be divided late."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from det_lightning.errors import InputError
from det_lightning.layers.call_names import flat
from det_lightning.layers.loss_calls import LOSS_FUNCTIONS, Items, counted, identity, loss_call
from det_lightning.layers.loss_terms import LossTerms
from det_lightning.ops import class_losses, loss, means

_MEAN = (torch.mean, Tensor.mean)
_SUM = (torch.sum, Tensor.sum)
_LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, Tensor.log_softmax)


class MeanFunctions:
    """Replacements of the functions that make means.

    Args:
        terms: records them.
        samples: of the micro-batch.
        strict: refuse what is not covered; otherwise it runs as it is.
        mixes: (name, args, kwargs) -> whether a call brings the samples together.
        refusal: makes the error.
    """

    def __init__(
        self,
        terms: LossTerms,
        samples: int,
        strict: bool,
        mixes: Callable[[str, tuple, dict], bool],
        refusal: Callable[..., Exception],
    ):
        self._terms, self._samples, self._strict, self._refusal = terms, samples, strict, refusal
        self._mixes = mixes
        self.replacements: dict[Callable, Callable] = {
            **{func: partial(self._loss, func) for func in LOSS_FUNCTIONS},
            loss.exact_mean: self._exact_mean,
            means.exact_mean: self._exact_mean,
            **dict.fromkeys(_SUM, self._sum),
            **dict.fromkeys(_LOG_SOFTMAX, self._log_softmax),
            **dict.fromkeys(_MEAN, self._mean),
        }

    def _loss(self, func, *args, **kwargs):
        self._terms.refuse_operands(func.__name__, tuple(flat((args, kwargs))))
        return self._reduced(loss_call(func, args, kwargs, self._samples, self._refusal))

    def _mean(self, input, *args, **kwargs):
        if args or kwargs:
            if not self._strict:
                return torch.mean(input, *args, **kwargs)
            raise self._refusal("mean over chosen dimensions or with a dtype", "Covered: values.mean() over all items.")
        return self._exact_mean(input)

    def _sum(self, input, *args, **kwargs):
        if args or kwargs or not input.is_floating_point():
            if not self._strict:
                return torch.sum(input, *args, **kwargs)
            if not input.is_floating_point():
                return self._count(input, *args, **kwargs)
            raise self._refusal("sum over chosen dimensions or with a dtype", "Covered: values.sum() over all items.")
        self._terms.refuse_operands("sum", (input,))
        self._terms.numbers.refuse_sum(input)
        return self._reduced(counted(self._in_float32(input), input.numel(), self._samples, "sum"))

    def _count(self, input, *args, **kwargs):
        """The sum of whole numbers; over the samples of the micro-batch it depends on the cut."""
        result = torch.sum(input, *args, **kwargs)
        if self._mixes("sum", (input, *args), kwargs) or self._terms.hold_mean((input,)):
            self._terms.note_statistics([result])
        return result

    def _exact_mean(self, values, mask=None, *, undivided=False):
        self._terms.refuse_operands("mean", (values,))
        self._terms.refuse_operands("exact_mean", (mask,))
        values = self._in_float32(values)
        if mask is None:
            return self._reduced(counted(values, values.numel(), self._samples))
        means.check_mask(values, mask)
        items = means.selected(values, mask)
        key = ("mask", *identity(mask))
        return self._reduced(Items(items, "mean", counted(items, items.numel(), 1).denominator, key, (mask,)))

    def _in_float32(self, values):
        if values.dtype in (torch.bfloat16, torch.float16):
            return values.float()
        if values.dtype is not torch.float32:
            raise InputError(f"means and sums are taken of float32 values, got {values.dtype}; convert with .float()")
        return values

    def _reduced(self, items: Items) -> Tensor:
        return items.values if items.reduction == "none" else self._terms.record_items(items)

    def _log_softmax(self, input, dim=None, *args, **kwargs):
        self._terms.refuse_operands("log_softmax", (input,))
        if args or any(value is not None for name, value in kwargs.items() if name != "_stacklevel") or dim is None:
            raise self._refusal("log_softmax without dim or with a dtype", "Covered: log_softmax(x, dim).")
        return class_losses.log_softmax(self._in_float32(input), dim)
