"""What surrounds the user's step: logging only looks at values, exactly, and a sample that stands in for an empty slice
leaves no trace in logged values or in the states of metrics.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric

from det_lightning.layers.function_mode import FunctionMode
from det_lightning.strategies.exact_results import Logged, logging


@contextmanager
def surroundings(module: torch.nn.Module, mode: FunctionMode, *, weightless: bool, window: object) -> Iterator[None]:
    """Runs a step of the module under `mode`.

    Args:
        weightless: its sample counts for nothing.
        window: see `Logged`.
    """
    log = module.log

    def log_outside(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if weightless:
            kwargs["batch_size"] = 0
        means, evaluate = mode.terms.made_of(value)
        with mode.suspended(), logging(Logged(means, evaluate, window, weightless)):
            log(name, value, *args, **kwargs)

    metrics = [each for each in module.modules() if isinstance(each, Metric)] if weightless else []
    states = [(each, each._copy_state_dict(), each._update_count) for each in metrics]
    module.__dict__["log"] = log_outside
    try:
        with mode:
            yield
    finally:
        del module.__dict__["log"]
        for metric, state, count in states:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count = count
