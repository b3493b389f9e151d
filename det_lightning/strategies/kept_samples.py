"""Metrics of torchmetrics that keep the samples and compute from all of them: in an order of the samples' own bits, so that
sums of floats in that computation do not depend on the split.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from det_lightning.optim.one_thread import one_thread


def kept_samples(metric: Metric) -> tuple[str, ...]:
    """The states in which a metric keeps samples; none of one whose value may depend on their order: the user's own, and
    torchmetrics' CatMetric."""
    module = type(metric).__module__
    if not module.startswith("torchmetrics.") or module == "torchmetrics.aggregation":
        return ()
    lists = [name for name, value in metric._defaults.items() if isinstance(value, list)]
    return tuple(lists) if all(metric._reductions[name] is dim_zero_cat for name in lists) else ()


def computed_in_one_order(metric: Metric, names: tuple[str, ...], compute: Callable[[], Any]) -> Any:
    """What `compute` returns with the kept samples in that order; the metric keeps its own."""
    before = {name: getattr(metric, name) for name in names}
    order = _order(list(before.values()))
    if order is None:
        return compute()
    try:
        with torch._C.DisableTorchFunction():
            for name, value in before.items():
                whole = dim_zero_cat(value)
                setattr(metric, name, [whole[order.to(whole.device)]])
        with one_thread():
            result = compute()
    finally:
        for name, value in before.items():
            setattr(metric, name, value)
    # Values of single samples stay with them.
    per_sample = any(isinstance(v, Tensor) and v.dim() and len(v) == len(order) for v in tree_leaves(result))
    return compute() if per_sample else result


def _order(states: list[Any]) -> Tensor | None:
    """int64 [samples]: places of the samples, sorted by their bits in all states; None unless each state holds as many."""
    with torch._C.DisableTorchFunction():
        wholes = [dim_zero_cat(state) for state in states if isinstance(state, Tensor) or len(state)]
        if not wholes or len(wholes) < len(states) or {len(whole) for whole in wholes} != {len(wholes[0])}:
            return None
        rows = [whole.detach().cpu().contiguous().reshape(len(whole), -1).view(torch.uint8) for whole in wholes]
        table = np.ascontiguousarray(torch.cat(rows, dim=1).numpy())
    if not table.size:
        return None
    return torch.from_numpy(np.argsort(table.view(f"V{table.shape[1]}")[:, 0], kind="stable"))
