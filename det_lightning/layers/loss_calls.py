"""Stock loss functions as per-item losses: which of their arguments are covered."""

import inspect
from collections.abc import Callable
from functools import cache

import torch.nn.functional as F
from torch import Tensor

from det_lightning.ops.item_losses import loss_items
from det_lightning.ops.loss import cross_entropy_items

# function -> (loss, arguments that are part of it)
_KINDS: dict[Callable, tuple[str, tuple[str, ...]]] = {
    F.cross_entropy: ("cross_entropy", ("ignore_index",)),
    F.mse_loss: ("mse", ()),
    F.l1_loss: ("l1", ()),
    F.smooth_l1_loss: ("smooth_l1", ("beta",)),
    F.huber_loss: ("huber", ("delta",)),
    F.binary_cross_entropy_with_logits: ("bce_logits", ()),
    F.binary_cross_entropy: ("bce", ()),
}
LOSS_FUNCTIONS = tuple(_KINDS)


def loss_call(func: Callable, args: tuple, kwargs: dict, refusal: Callable[..., Exception]) -> tuple[Tensor, bool]:
    """The items of a call of a stock loss function, and whether it takes their mean.

    For a mean over class indices the ignored items are left out, so that they count for nothing.

    Raises:
        UncoveredError: made by `refusal`; an argument outside the contract.
        InputError: shapes, dtypes or targets that do not fit.
    """
    kind, own = _KINDS[func]
    signature = _signature(func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    x, target, reduction = given.pop("input"), given.pop("target"), given.pop("reduction")
    parameters = [given.pop(name) for name in own]
    changed = [name for name, value in given.items() if not _same(value, signature.parameters[name].default)]
    if changed or reduction not in ("mean", "none"):
        what = ", ".join(f"{name}=" for name in changed) or f"reduction={reduction!r}"
        allowed = ", ".join(("reduction='mean' or 'none'", *own))
        raise refusal(f"{func.__name__} with {what}", f"Covered besides prediction and target: {allowed}.")
    if kind != "cross_entropy":
        return loss_items(kind, x, target, *(float(value) for value in parameters)), reduction == "mean"
    (ignore_index,) = parameters
    items = cross_entropy_items(x, target, ignore_index=ignore_index)
    if reduction == "mean" and bool((ignored := target == ignore_index).any()):
        items = items[~ignored]
    return items, reduction == "mean"


def _same(value: object, default: object) -> bool:
    return value is default or (isinstance(value, (int, float, str)) and value == default)


@cache
def _signature(func: Callable) -> inspect.Signature:
    return inspect.signature(func)
