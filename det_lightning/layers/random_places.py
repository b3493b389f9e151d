"""Where random numbers of a training step come from: (seed, step, place, sample, coordinates).

The place is the path of the module that asks and the number of its request in this micro-batch; what activation
checkpointing computes again asks from the same places again.
"""

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

from det_lightning.ops import random_values
from det_lightning.ops.philox import derived_key

_DOMAIN = 0x64657421  # apart from the counters of the order of samples


class RandomPlaces:
    """Random numbers of one micro-batch.

    Args:
        seed: of the run.
        step: global optimizer step.
        positions: int64 [n], of the samples within the epoch's order.
        phase: which part of the step asks.
    """

    def __init__(self, seed: int, step: int, positions: Tensor, phase: str, calls: dict[str, int] | None = None):
        self.seed, self.step, self.positions, self.phase = seed, step, positions, phase
        self.calls = dict(calls or {})
        self._flattened: dict[int, int] = {}  # size of a dimension 0 that holds samples and another dimension

    def again(self, calls: dict[str, int]) -> "RandomPlaces":
        """The same places with these requests made."""
        other = RandomPlaces(self.seed, self.step, self.positions, self.phase, calls)
        other._flattened = self._flattened
        return other

    def note_flatten(self, before: torch.Size, after: torch.Size) -> None:
        """A view merged the samples with dimensions beside them: [n, k, ...] became [n k, ...]."""
        samples = len(self.positions)
        if before and after and before[0] == samples and after[0] > samples and after[0] % samples == 0:
            product = 1
            for size in before:
                product *= size
                if product == after[0]:
                    self._flattened[after[0]] = after[0] // samples

    def words(self, x: Tensor, path: str, refusal: Callable[..., Exception]) -> Tensor:
        """int64 of x's shape: a word for each element.

        Raises:
            UncoveredError: made by `refusal`; dimension 0 does not hold the samples.
        """
        samples = len(self.positions)
        number = self.calls[path] = self.calls.get(path, 0) + 1
        if x.dim() and x.shape[0] == samples:
            shape = x.shape[1:]
        elif x.dim() and x.shape[0] in self._flattened:
            shape = (self._flattened[x.shape[0]], *x.shape[1:])
        else:
            raise refusal(
                f"random numbers for a tensor of shape {list(x.shape)} with {samples} samples in the micro-batch",
                "Each number belongs to a sample: bring the samples into dimension 0 (movedim), or flatten them from there.",
            )
        digest = int.from_bytes(blake2b(f"{self.phase}:{path}".encode(), digest_size=8).digest())
        key = derived_key(self.seed, self.step & 0xFFFFFFFF, self.step >> 32, _DOMAIN)
        key = derived_key(key, digest & 0xFFFFFFFF, digest >> 32, number)
        return random_values.sample_words(key, self.positions.to(x.device), tuple(shape)).view(x.shape)
