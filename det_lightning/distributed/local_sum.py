"""What one rank has added up of a bucket's gradients: a window of a few 32-bit words an element, or full digits.

Full digits take 168 bytes an element, so they live only while a bucket's backward passes run; between micro-batches the
sum is kept in a window. Both are exact, so the change moves no bit.
"""

from functools import cache
from importlib.util import find_spec

import torch

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed.buckets import BLOCK
from det_lightning.ops.digits import normalise_digits
from det_lightning.ops.windowed_digits import WindowedDigits


@cache
def windows_on(device_type: str) -> bool:
    """Whether there are kernels of windowed digits for this kind of device."""
    return device_type == "cpu" or find_spec(f"det_lightning.kernels.{device_type}_windowed_digits") is not None


class LocalSum:
    """Exact sums of `elements` values, a multiple of BLOCK.

    Attributes:
        digits: int64 [elements, NB], the full form, or None.
        window: [blocks, BLOCK] in windowed form, or None; without either the sums are zero.
    """

    def __init__(self, elements: int, device: torch.device):
        self.elements, self.device = elements, device
        self.digits: torch.Tensor | None = None
        self.window: WindowedDigits | None = None

    def open(self) -> torch.Tensor:
        """int64 [elements, NB] to add into."""
        if self.digits is None:
            self.digits = torch.zeros((self.elements, NB), dtype=torch.int64, device=self.device)
        return self.digits

    def close(self) -> None:
        """Ends a backward pass that others will follow: the full digits move into the window."""
        if self.digits is None or not windows_on(self.device.type):
            return
        added = WindowedDigits.from_digits(self.digits.view(-1, BLOCK, NB))
        self.digits = None
        self.window = added if self.window is None else self.window.add_(added)

    def take(self) -> torch.Tensor:
        """int64 [elements, NB], canonical: the sums as full digits; the object is empty afterwards."""
        digits, window = self.digits, self.window
        self.digits = self.window = None
        if digits is not None and digits.is_cuda:
            # Taken on the exchange's stream, made on the backward pass's: its memory is not free before both are done.
            digits.record_stream(torch.cuda.current_stream(digits.device))
        if window is not None:
            total = window.to_digits().view(-1, NB)
            return total if digits is None else normalise_digits(total + digits)
        if digits is not None:
            return normalise_digits(digits)
        return torch.zeros((self.elements, NB), dtype=torch.int64, device=self.device)

    @property
    def empty(self) -> bool:
        return self.digits is None and self.window is None
