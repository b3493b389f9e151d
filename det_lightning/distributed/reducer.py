"""Gradient sums over all samples of the global batch: digits of every product, added over micro-batches and ranks.

One flat int64 buffer holds, in this order: the digits of every trainable parameter, how often each was used, the
digits of the loss means, and counters. It is added over the ranks in one exact all-reduce; then each gradient is
divided by the exact number of items and rounded once.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed.all_reduce import add_over_ranks
from det_lightning.errors import UncoveredError
from det_lightning.ops.digits import det_finalize
from det_lightning.ops.reduction import add_sum_digits


class GradientReducer:
    """Collects the digits of one optimizer step and turns them into gradients.

    Args:
        parameters: (name, parameter) of everything that may receive a gradient, in the same order on every rank.
        means: the most means a loss is made of.
        group: the process group of the replicas; the default group if None.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        means: int,
        group: dist.ProcessGroup | None = None,
    ):
        self.parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self.group = group
        self._terms = 0  # means in the loss of this step
        self.weightless = False  # the current micro-batch stands in for an empty slice
        elements = sum(parameter.numel() for _, parameter in self.parameters)
        self._buffer = torch.zeros(elements * NB + len(self.parameters) + means * (NB + 1) + 1, dtype=torch.int64)
        places = iter(self._buffer.split([elements * NB, len(self.parameters), means * NB, means, 1]))
        digits, self._uses, loss_digits, self._counts, self._sample_digest = places
        self._loss_digits = loss_digits.view(means, NB)
        self._places: dict[int, tuple[int, torch.Tensor]] = {}
        first = 0
        for place, (_, parameter) in enumerate(self.parameters):
            last = first + parameter.numel() * NB
            self._places[id(parameter)] = (place, digits[first:last].view(*parameter.shape, NB))
            first = last

    def digits(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """int64 [*parameter.shape, NB] that a backward pass adds into; None while the micro-batch has weight zero."""
        if self.weightless:
            return None
        found = self._places.get(id(parameter))
        if found is None:
            raise UncoveredError(
                f"a parameter of shape {tuple(parameter.shape)} that is not in the model, or was frozen when fit() "
                f"began, received a gradient. Register it in the LightningModule before training starts."
            )
        place, digits = found
        self._uses[place] += 1
        return digits

    def add_means(self, values: list[torch.Tensor]) -> None:
        """Adds the per-item values of each mean of the loss of one micro-batch."""
        self._terms = max(self._terms, len(values))
        if self.weightless:
            return
        for place, items in enumerate(values):
            add_sum_digits(self._loss_digits[place], items.reshape(-1), dim=0)
            self._counts[place] += items.numel()

    def add_sample_digest(self, digest: int) -> None:
        """Adds the digest of a micro-batch's samples, modulo 2^64."""
        self._sample_digest += digest - 2**64 if digest >= 2**63 else digest

    def clear(self) -> None:
        self._buffer.zero_()
        self._terms = 0

    def reduce(self) -> tuple[list[torch.Tensor], int]:
        """Adds over the ranks, writes every used parameter's `.grad`, and clears.

        Returns:
            (the mean of each loss term over the global batch, float32; the digest of all its samples, unsigned).
        """
        add_over_ranks(self._buffer, self.group)
        counts = self._counts.tolist()
        terms = max([self._terms, *(place for place, count in enumerate(counts, 1) if count)])
        counts = counts[:terms]
        if len(set(counts)) > 1:
            raise UncoveredError(
                f"the means of the loss divide by unlike numbers of items over the global batch: {counts}. "
                f"Every micro-batch must make its loss of the same means."
            )
        for place, (_, parameter) in enumerate(self.parameters):
            if int(self._uses[place]):
                digits = self._places[id(parameter)][1]
                parameter.grad = det_finalize(digits, dtype=parameter.dtype, denominator=counts[0])
        # A count of 0, as when every item is left out, makes the canonical NaN.
        means = [det_finalize(self._loss_digits[place], denominator=count) for place, count in enumerate(counts)]
        digest = int(self._sample_digest) % 2**64
        self.clear()
        return means, digest
