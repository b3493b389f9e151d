"""Stock loss functions as per-item losses: which of their arguments are covered, and what a mean of them divides by."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from types import NoneType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from det_lightning.arithmetic.formats import LOWEST_EXPONENT, NB
from det_lightning.arithmetic.long_accumulator import digits_of
from det_lightning.errors import InputError
from det_lightning.ops.class_losses import check_divisors, class_items, kl_items, probability_items
from det_lightning.ops.item_losses import loss_items
from det_lightning.ops.loss import cross_entropy_items
from det_lightning.ops.means import item_digits

# function -> (loss, arguments that are part of it)
_KINDS: dict[Callable, tuple[str, tuple[str, ...]]] = {
    F.cross_entropy: ("cross_entropy", ("weight", "ignore_index", "label_smoothing")),
    F.nll_loss: ("nll", ("weight", "ignore_index")),
    F.kl_div: ("kl", ("log_target",)),
    F.mse_loss: ("mse", ("weight",)),
    F.l1_loss: ("l1", ("weight",)),
    F.smooth_l1_loss: ("smooth_l1", ("beta",)),
    F.huber_loss: ("huber", ("delta", "weight")),
    F.binary_cross_entropy_with_logits: ("bce_logits", ("weight", "pos_weight")),
    F.binary_cross_entropy: ("bce", ("weight",)),
}
LOSS_FUNCTIONS = tuple(_KINDS)
_DIVIDED_BY_WEIGHTS = ("mse", "l1")  # as torch does; its other losses divide by the number of items


@dataclass(frozen=True)
class Items:
    """The items of a mean or a sum over them.

    Attributes:
        values: float32, one an item.
        reduction: what the caller asked for.
        denominator: int64 [NB], what a mean of this micro-batch divides by.
        key: means of one key divide by the same number, however the global batch is cut.
        holds: the tensors whose identity is in the key.
    """

    values: Tensor
    reduction: Literal["none", "mean", "sum"]
    denominator: Tensor
    key: tuple
    holds: tuple[Tensor, ...] = ()


def count_digits(count: int) -> Tensor:
    """int64 [NB]: an integer as digits."""
    return torch.tensor([*digits_of(count << -LOWEST_EXPONENT), 0, 0, 0], dtype=torch.int64)[:NB]


def counted(values: Tensor, count: int, samples: int, reduction: str = "mean") -> Items:
    """Items of which every sample has equally many: their number is in proportion to the samples."""
    return Items(values, reduction, count_digits(count), ("items", Fraction(count, max(samples, 1))))


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for two views of the same elements, while one of them lives."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def loss_call(func: Callable, args: tuple, kwargs: dict, samples: int, refusal: Callable[..., Exception]) -> Items:
    """The items of a call of a stock loss function.

    For a mean over class indices the ignored items are left out, so that they count for nothing.

    Args:
        samples: of this micro-batch.

    Raises:
        UncoveredError: made by `refusal`; an argument outside the contract.
        InputError: shapes, dtypes, devices or targets that do not fit.
    """
    kind, own = _KINDS[func]
    signature = _signature(func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    x, target, reduction = given.pop("input"), given.pop("target"), given.pop("reduction")
    parameters = {name: given.pop(name) for name in own}
    allowed = ("mean", "sum", "none", *(("batchmean",) if kind == "kl" else ()))
    _check_devices(func.__name__, x, {"target": target, **parameters, **given})
    changed = [name for name, value in given.items() if not _same(value, signature.parameters[name].default)]
    if changed or reduction not in allowed:
        what = ", ".join(f"{name}=" for name in changed) or f"reduction={reduction!r}"
        advice = f"Covered besides prediction and target: reduction={' or '.join(map(repr, allowed))}, " + ", ".join(
            own
        )
        raise refusal(f"{func.__name__} with {what}", advice)
    x, target = _in_float32(x), _in_float32(target)
    if kind in ("cross_entropy", "nll"):
        return _class_call(kind, x, target, reduction, samples, **parameters)
    if kind == "kl":
        values = kl_items(x, target, **parameters)
        batch = reduction == "batchmean"
        count = len(values) if batch else values.numel()
        return counted(values, count, samples, "mean" if batch else reduction)
    return _item_call(kind, x, target, reduction, samples, parameters)


def _item_call(kind: str, x: Tensor, target: Tensor, reduction: str, samples: int, parameters: dict) -> Items:
    weight = _in_float32(parameters.pop("weight", None))
    if weight is not None and kind in _DIVIDED_BY_WEIGHTS and weight.shape != x.shape:
        raise InputError(
            f"the {kind} loss takes a weight of the predictions' shape {list(x.shape)}, got {list(weight.shape)}"
        )
    others = [
        _in_float32(value) if isinstance(value, (Tensor, NoneType)) else float(value) for value in parameters.values()
    ]
    values = loss_items(kind, x, target, *others, weight=weight)
    if weight is None or kind not in _DIVIDED_BY_WEIGHTS or reduction != "mean":
        return counted(values, values.numel(), samples, reduction)
    check_divisors(weight)
    return Items(values, "mean", item_digits(weight).cpu(), ("weights", *identity(weight)), (weight,))


def _in_float32(value: Tensor | None) -> Tensor | None:
    return value.float() if value is not None and value.dtype in (torch.bfloat16, torch.float16) else value


def _class_call(
    kind: str,
    x: Tensor,
    target: Tensor,
    reduction: str,
    samples: int,
    *,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> Items:
    weight = _in_float32(weight)
    if target.is_floating_point():
        rows, shape = _rows(x)
        classes = _rows(target)[0] if target.shape == x.shape else target
        values = probability_items(rows, classes, weight=weight, label_smoothing=float(label_smoothing))
        return counted(values.reshape(shape), values.numel(), samples, reduction)
    rows, shape = _rows(x)
    places = target.reshape(-1) if target.shape == shape else target
    if kind == "cross_entropy" and weight is None and not label_smoothing:
        values = cross_entropy_items(rows, places, ignore_index=ignore_index)
    else:
        values = class_items(
            rows,
            places,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=float(label_smoothing),
            log_probabilities=kind == "nll",
        )
    if reduction == "none":
        return counted(values.reshape(shape), values.numel(), samples, "none")
    kept = places != ignore_index
    if not bool(kept.all()):
        values, places = values[kept], places[kept]
    if weight is None:
        key = ("kept", *identity(target), ignore_index)
        return Items(values, reduction, count_digits(values.numel()), key, (target,))
    key = ("weights", *identity(target), *identity(weight), ignore_index)
    return Items(values, reduction, item_digits(weight[places]).cpu(), key, (target, weight))


def _check_devices(name: str, x: Tensor, others: dict[str, object]) -> None:
    for argument, value in others.items():
        if isinstance(value, Tensor) and value.device != x.device:
            raise InputError(
                f"{name} takes its tensors on one device, got input on {x.device} and {argument} on {value.device}. Move "
                f"{argument} to input.device; what belongs to the model follows it as a buffer (register_buffer)"
            )


def _rows(x: Tensor) -> tuple[Tensor, torch.Size]:
    """[N, C, *sizes] as rows [N * sizes, C], with the shape [N, *sizes] of one value a row; [C] is one row."""
    if x.dim() < 2:
        return x.reshape(1, -1), x.shape[:0]
    last = x.movedim(1, -1)
    return last.reshape(-1, x.shape[1]), last.shape[:-1]


def _same(value: object, default: object) -> bool:
    return value is default or (isinstance(value, (int, float, str)) and value == default)


@cache
def _signature(func: Callable) -> inspect.Signature:
    return inspect.signature(func)
