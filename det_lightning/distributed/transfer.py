"""Who looks on while exact sums travel: a check of what arrives, or a drill that changes it."""

from collections.abc import Callable
from typing import Any

import torch

watchers: list[Callable[[str, torch.Tensor, torch.Tensor, Any, Any], Any]] = []
"""Each is called as watcher(label, received, sent, group, work) and answers what is waited for in place of `work`; the first
is the nearest to the wire."""


def watched(label: str, received: torch.Tensor, sent: torch.Tensor, group: Any, work: Any) -> Any:
    """What to wait for in place of `work`, a started all-to-all or reduce-scatter of `sent`, which holds the ranks' shares
    one after another. label: whose sums these are.
    """
    for watcher in watchers:
        work = watcher(label, received, sent, group, work)
    return work
