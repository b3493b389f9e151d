"""Functions of parameters that meet samples (layers/meetings.py): each has a gradient sum of its own, like a parameter.

They are made anew in every micro-batch, and must be the same there and on every rank: the bits of their values are compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from det_lightning.errors import UncoveredError
from det_lightning.kernels.dispatch import tensor_lanes
from det_lightning.layers.loss_plan import bits_of


@dataclass
class MetFunction:
    """One function of parameters.

    Attributes:
        name: of the parameters that it is made of, for errors.
        stand_in: has the shape and dtype; its `.grad` is the finished gradient.
        tensor: the function itself, with the graph of the last micro-batch.
        signature: what must be the same in every micro-batch and on every rank.
    """

    name: str
    stand_in: Tensor
    tensor: Tensor
    signature: tuple


class MetFunctions:
    """Those of one optimizer step, in the order in which a micro-batch meets them."""

    def __init__(self) -> None:
        self.known: list[MetFunction] = []
        self._met = 0

    def admit(self, number: int, tensor: Tensor, made_of: tuple[str, ...]) -> MetFunction:
        """The number-th function of this micro-batch; the next number makes a new one.

        Raises:
            UncoveredError: it is not what an earlier micro-batch of the step had in its place.
        """
        name = f"a function of {', '.join(made_of)}"
        signature = (made_of, tuple(tensor.shape), str(tensor.dtype), tensor_lanes(tensor.detach()))
        self._met = max(self._met, number + 1)
        if number == len(self.known):
            stand_in = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).requires_grad_()
            self.known.append(MetFunction(name, stand_in, tensor, signature))
        function = self.known[number]
        if function.signature != signature:
            raise UncoveredError(
                f"{name} has other values, or another place, than in the micro-batch before, so it is not made of "
                f"parameters alone: a buffer that changes, or a branch that depends on the samples, is in it. Its gradient "
                f"would depend on how the global batch is cut."
            )
        function.tensor = tensor
        return function

    def pattern(self, pattern: int) -> int:
        """20 bits of a micro-batch's pattern and of the functions that it met; then the next micro-batch begins."""
        met, self._met = self._met, 0
        return bits_of((pattern, [function.signature for function in self.known[:met]])) if met else pattern

    def backward(self) -> None:
        """Hands the finished gradients on to the parameters, added there pairwise in autograd's order.

        The graphs stay: a penalty or another loss may go through them again.
        """
        ready = [function for function in self.known if function.stand_in.grad is not None]
        if ready:
            gradients = [function.stand_in.grad for function in ready]
            torch.autograd.backward([function.tensor for function in ready], gradients, retain_graph=True)
        for function in ready:
            function.stand_in.grad = None
