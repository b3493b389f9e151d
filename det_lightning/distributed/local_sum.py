"""What one rank has added up of a bucket's gradients: a window of a few 32-bit words an element, or full digits.

Full digits take 168 bytes an element, so they live only while a bucket's backward passes run; between micro-batches the
sum is kept in a window. Both are exact, so the change moves no bit.
"""

from functools import cache
from importlib.util import find_spec

import torch

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed.buckets import BLOCK
from det_lightning.ops.windowed_digits import WindowedDigits


@cache
def windows_on(device_type: str) -> bool:
    """Whether there are kernels of windowed digits for this kind of device."""
    return device_type == "cpu" or find_spec(f"det_lightning.kernels.{device_type}_windowed_digits") is not None


class DigitPool:
    """Full digits that were used and may be used again: on a CPU fresh memory costs as much as adding into it.

    Holds at most two buffers of each size; on CUDA none, where torch's allocator does this.
    """

    _MOST = 2

    def __init__(self):
        self._spare: dict[int, list[torch.Tensor]] = {}

    def zeros(self, elements: int, device: torch.device) -> torch.Tensor:
        """int64 zeros [elements, NB]."""
        spare = self._spare.get(elements)
        if spare and device.type == "cpu":
            return spare.pop().zero_()
        return torch.zeros((elements, NB), dtype=torch.int64, device=device)

    def give_back(self, digits: torch.Tensor) -> None:
        """Nothing reads these digits any more."""
        spare = self._spare.setdefault(digits.shape[0], [])
        if digits.is_cpu and len(spare) < self._MOST:
            spare.append(digits)


class LocalSum:
    """Exact sums of `elements` values, a multiple of BLOCK.

    Attributes:
        digits: int64 [elements, NB], the full form, or None.
        window: [blocks, BLOCK] in windowed form, or None; without either the sums are zero.
        label: names of the parameters whose gradients these are.
    """

    def __init__(self, elements: int, device: torch.device, pool: DigitPool | None = None, label: str = ""):
        self.elements, self.device, self.pool, self.label = elements, device, pool or DigitPool(), label
        self.digits: torch.Tensor | None = None
        self.window: WindowedDigits | None = None

    def open(self) -> torch.Tensor:
        """int64 [elements, NB] to add into."""
        if self.digits is None:
            self.digits = self.pool.zeros(self.elements, self.device)
        return self.digits

    def close(self) -> None:
        """Ends a backward pass that others will follow: the full digits move into the window."""
        if self.digits is None or not windows_on(self.device.type):
            return
        added = WindowedDigits.from_digits(self.digits.view(-1, BLOCK, NB))
        self.pool.give_back(self.digits)
        self.digits = None
        self.window = added if self.window is None else self.window.add_(added)

    def take(self) -> torch.Tensor:
        """int64 [elements, NB], any state: the sums as full digits; the object is empty afterwards."""
        window = self.take_window()
        digits, self.digits = self.digits, None
        _hold_for_stream(digits)
        if window is not None:
            total = window.to_digits().view(-1, NB)
            if digits is not None:
                total += digits
                self.pool.give_back(digits)
            return total
        return self.pool.zeros(self.elements, self.device) if digits is None else digits

    def take_window(self) -> WindowedDigits | None:
        """What lies in windowed form; the object keeps the rest."""
        window, self.window = self.window, None
        if window is not None:
            _hold_for_stream(window.words, window.base, window.specials)
        return window

    @property
    def empty(self) -> bool:
        return self.digits is None and self.window is None


def _hold_for_stream(*tensors: torch.Tensor | None) -> None:
    """Taken on the exchange's stream, made on the backward pass's: their memory is not free before both are done."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
