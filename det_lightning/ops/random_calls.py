"""Random numbers for a training step: `det_lightning.random`."""

import torch
from torch.overrides import handle_torch_function, has_torch_function


class random:
    """Random numbers that belong to a sample's place in the run, not to a rank or a batch.

    Under `strategy="det"` each value is a function of the seed, the step, the module that asks, the sample and the
    coordinates within it: the same at every world size, micro-batch size and resume, and drawn anew where activation
    checkpointing computes again. Elsewhere they are torch's own. Samples lie in dimension 0 of `x`.
    """

    @staticmethod
    def rand_like(x: torch.Tensor) -> torch.Tensor:
        """Uniform in [0, 1), of x's shape, dtype and device."""
        if has_torch_function((x,)):
            return handle_torch_function(random.rand_like, (x,), x)
        return torch.rand_like(x)

    @staticmethod
    def randn_like(x: torch.Tensor) -> torch.Tensor:
        """Normal with mean 0 and deviation 1, of x's shape, dtype and device."""
        if has_torch_function((x,)):
            return handle_torch_function(random.randn_like, (x,), x)
        return torch.randn_like(x)

    @staticmethod
    def randint_like(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """int64 in [low, high), of x's shape."""
        if has_torch_function((x,)):
            return handle_torch_function(random.randint_like, (x,), x, low, high)
        return torch.randint_like(x, low, high, dtype=torch.int64)

    @staticmethod
    def bernoulli_like(x: torch.Tensor, p: float) -> torch.Tensor:
        """bool of x's shape, each true with probability p."""
        if has_torch_function((x,)):
            return handle_torch_function(random.bernoulli_like, (x,), x, p)
        return torch.rand_like(x, dtype=torch.float32) < p
