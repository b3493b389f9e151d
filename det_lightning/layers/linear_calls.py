"""Calls of linear layers and of products with a weight: where weights meet samples, with torch.autocast or without."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from det_lightning.layers.batch_free import BatchFree
from det_lightning.layers.loss_terms import LossTerms
from det_lightning.layers.meetings import GradientSink, Meetings, Place
from det_lightning.layers.sample_places import places_of
from det_lightning.ops import linear


class LinearCalls:
    """Those of one micro-batch.

    Args:
        sink: receives the digits of parameter gradients; see `Meetings`.
        samples: of the micro-batch.
        refusal: makes the error.
    """

    def __init__(
        self,
        batch_free: BatchFree,
        meetings: Meetings,
        terms: LossTerms,
        sink: GradientSink | None,
        samples: int,
        refusal: Callable[..., Exception],
    ):
        self._batch_free, self._meetings, self._terms = batch_free, meetings, terms
        self._sink, self._samples, self._refusal = sink, samples, refusal
        self._autocast_dtype: torch.dtype | None = None

    def product(self, name: str, args: tuple) -> Tensor | None:
        """x @ weight as the linear layer that it is; None if the call is another."""
        if name not in ("matmul", "mm") or len(args) != 2 or args[1].dim() != 2 or args[0].dim() < 2:
            return None
        x, weight = args
        if weight.requires_grad and self._batch_free(weight):
            _, transposed = self._batch_free.call("t", Tensor.t, (weight,), {})
        elif self._batch_free.is_constant(weight):
            transposed = weight.t()
        else:
            return None
        return self.apart_from_autocast(self.linear, (x, transposed), {}, [x])

    def linear(self, input, weight, bias=None, *, sink=None):
        """`linear` of ops/linear.py with the digits of its parameters in their places; `sink` is what that function has."""
        places: list[Place | None] = []
        grad = torch.is_grad_enabled()
        for role, parameter in (("weight", weight), ("bias", bias)):
            trained = parameter is not None and parameter.requires_grad and grad
            if not trained or self._sink is None:
                places.append(None)
            if (trained and self._sink is None) or (not trained and not self._made_of_samples(parameter)):
                continue
            if not trained or not self._batch_free(parameter):
                raise self._refusal(
                    f"linear with a {role} that is computed from samples",
                    "Its gradient would be rounded before the sum over all samples: write the sum over features with "
                    "operations on samples, (x.unsqueeze(1) * weight), or make the weight of parameters alone.",
                )
            places.append(self._meetings.place(parameter))
        self._terms.refuse_operands("linear", (input, weight, bias))
        weight, bias = (
            operand if place is None else place.leaf for operand, place in zip((weight, bias), places, strict=True)
        )
        sink = None if self._sink is None else _SinkOf(*places)
        if self._autocast_dtype is not None:
            input = input.to(self._autocast_dtype)
            # A parameter's gradient is the exact sum, not the rounding to bfloat16 of one: the casts carry digits.
            weight, bias = self._cast(weight), self._cast(bias)
        return linear.linear(input, weight, bias, sink=sink)

    def _made_of_samples(self, weight: Tensor | None) -> bool:
        """Whether a weight without gradient has samples for rows or columns, or is made of one."""
        if weight is None or self._sink is None or self._samples == 1 or self._batch_free.holds_none(weight):
            return False
        return self._samples in weight.shape or places_of(weight) is not None

    def _cast(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or self._sink is None:
            return parameter if parameter is None else parameter.to(self._autocast_dtype)
        return parameter.detach().to(self._autocast_dtype).requires_grad_(parameter.requires_grad)

    def apart_from_autocast(self, replacement: Callable, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """The covered call with torch.autocast off inside; linear layers round their operands themselves."""
        device = operands[0].device.type if operands else "cpu"
        if not torch.is_autocast_enabled(device):
            return replacement(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if dtype is not torch.bfloat16:
            raise self._refusal(
                f"torch.autocast to {dtype}", "Covered: bfloat16, as with Trainer(precision='bf16-mixed')."
            )
        self._autocast_dtype = dtype
        try:
            with torch.autocast(device, enabled=False):
                return replacement(*args, **kwargs)
        finally:
            self._autocast_dtype = None


class _SinkOf:
    """The places of one call's weight and bias. Activation checkpointing hands the backward pass a copy of a weight: it is
    told by its number of dimensions."""

    def __init__(self, weight: Place | None, bias: Place | None):
        self._places = {2: weight, 1: bias}

    def digits(self, parameter: Tensor) -> Tensor | None:
        return self._places[parameter.dim()].digits()

    def added(self, parameter: Tensor) -> None:
        self._places[parameter.dim()].added()

    def add_product(self, parameter: Tensor, x: Tensor, w: Tensor) -> None:
        self._places[parameter.dim()].add_product(x, w)
