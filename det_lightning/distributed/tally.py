"""The small integers of a step: sums and denominators of its means, how it was made, the digest of its samples."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed.exchange import Exchange
from det_lightning.distributed.waiting import wait
from det_lightning.errors import UncoveredError
from det_lightning.ops.digits import digits_value
from det_lightning.ops.quotient import det_quotient

# Micro-batches with samples, the sum and the sum of squares of their structures; the same three of all micro-batches and
# their patterns; the digest of the samples.
_EXTRA = 7


class Tally:
    """Added over the micro-batches of a step, then over the ranks.

    Args:
        means: the most means a loss is made of.
    """

    def __init__(self, means: int):
        self._means = means
        self.clear()

    def add_means(self, digits: Sequence[torch.Tensor], denominators: Sequence[torch.Tensor], structure: int) -> None:
        """The means of one micro-batch: int64 [NB] each, sum and denominator; see `LossPlan.structure`."""
        for place, (numerator, denominator) in enumerate(zip(digits, denominators, strict=True)):
            self._sums[place, 0] += numerator
            self._sums[place, 1] += denominator
        self._extra[:3] += torch.tensor([1, structure, structure * structure])

    def add_pattern(self, pattern: int) -> None:
        """How many backward passes a micro-batch makes and of which means; of one without samples too."""
        self._extra[3:6] += torch.tensor([1, pattern, pattern * pattern])

    def add_sample_digest(self, digest: int) -> None:
        """Adds the digest of a micro-batch's samples, modulo 2^64."""
        self._extra[6] += digest - 2**64 if digest >= 2**63 else digest

    def start(self, exchange: Exchange, device: torch.device) -> None:
        """Starts the sum over ranks; every micro-batch of this rank has been added."""
        if exchange.levels:
            self._integers = self._integers.to(device)
        self._work = exchange.add(self._integers)

    def wait(self) -> None:
        """Until the sums are those of all ranks."""
        wait(self._work)
        self._work = None
        self._lay_out(self._integers.cpu())

    def check(self) -> None:
        """Raises UncoveredError unless every micro-batch made its loss of the same means with the same constants."""
        numbers = self._extra.tolist()
        # Equal numbers, and no others, make these equal.
        if any(count * squares != total * total for count, total, squares in (numbers[:3], numbers[3:6])):
            raise UncoveredError(
                "the micro-batches of one step made their losses unlike: of other means, with other constants or functions "
                "of parameters, or of means whose numbers of items are equal in one and unlike in another. A number that "
                "depends on the size of the batch, on what is in it or on batch_idx is such a case, wherever it enters. "
                "Every micro-batch must make its loss alike; items that do not count belong into the mask of "
                "det_lightning.exact_mean(values, mask)."
            )

    def denominator(self, place: int, *, total: bool) -> Fraction:
        """What a mean divides by over the global batch; 1 for a sum. 0 where it is no finite number."""
        if total:
            return Fraction(1)
        value = digits_value(self._sums[place, 1])
        return value if isinstance(value, Fraction) else Fraction(0)

    def mean(self, place: int, *, total: bool) -> torch.Tensor:
        """The mean over the global batch, float32 without dimensions."""
        return det_quotient(self._sums[place, 0], self.denominator(place, total=total))

    @property
    def sample_digest(self) -> int:
        return int(self._extra[6]) % 2**64

    def clear(self) -> None:
        self._lay_out(torch.zeros(self._means * 2 * NB + _EXTRA, dtype=torch.int64))
        self._work: Any = None

    def _lay_out(self, integers: torch.Tensor) -> None:
        self._integers = integers
        sums, self._extra = integers.split([self._means * 2 * NB, _EXTRA])
        self._sums = sums.view(self._means, 2, NB)
