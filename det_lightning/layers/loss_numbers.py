"""The numbers that items and activations of a micro-batch are computed with: one that depends on the samples at hand, or on
how many they are, makes the training depend on how the global batch is cut.
"""

from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.layers.call_names import DIVISIONS

COMMUTATIVE = frozenset("mul rmul multiply".split())
SCALINGS = COMMUTATIVE | DIVISIONS | frozenset("imul neg".split())


class LossNumbers:
    """Those of one micro-batch.

    Args:
        samples: of the micro-batch.

    Attributes:
        seen: all of them; every micro-batch of a step is to have the same.
    """

    def __init__(self, samples: int):
        self._samples = samples
        self.seen: set[float] = set()
        self._divided: dict[object, float] = {}  # autograd node of what was divided by the number of samples -> it

    def note(self, name: str, args: tuple, result: Tensor) -> None:
        """A call on items or activations that gave `result`."""
        self.seen.update(_numbers(args))
        count = self._sample_count(name, args)
        if count is not None:
            self._divided[result.grad_fn] = count

    def refuse_sum(self, values: Tensor) -> None:
        """Raises UncoveredError for the sum of items that were divided by the number of samples at hand."""
        if values.grad_fn in self._divided:
            raise _mean_of_means(self._divided[values.grad_fn])

    def refuse_sample_counts(self, name: str, args: tuple) -> None:
        """Raises UncoveredError for a sum that is divided by the number of samples at hand: a mean of means."""
        count = self._sample_count(name, args)
        if count is not None:
            raise _mean_of_means(count)

    def _sample_count(self, name: str, args: tuple) -> float | None:
        """The number of samples, if the call divides by it."""
        for number in _numbers(args) if name in SCALINGS else ():
            divisor = number if name in DIVISIONS or not number else 1.0 / number
            if divisor > 1 and abs(divisor - self._samples) < 1e-6 * divisor:
                return divisor
        return None


def _numbers(args: tuple) -> list[float]:
    return [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _mean_of_means(divisor: float) -> UncoveredError:
    return UncoveredError(
        f"a sum over the micro-batch is divided by {divisor:g}, the number of its samples, which depends on how the global "
        f"batch is cut. Write the mean: reduction='mean', values.mean() or det_lightning.exact_mean(values, mask)."
    )
