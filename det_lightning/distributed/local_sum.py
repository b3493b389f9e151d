"""What one rank has added up of some gradients: a window of a few 32-bit words an element, or full digits.

Full digits take 168 bytes an element, so many of them live only while their bucket's backward pass runs; between
micro-batches the sum is kept in a window. Large products are added to a window at once. All of this is exact, so no choice
moves a bit.
"""

from functools import cache
from importlib.util import find_spec

import torch

from det_lightning.arithmetic.formats import NB
from det_lightning.ops.gemm_windowed import add_gemm_windowed, gemm_windowed
from det_lightning.ops.windowed_digits import WindowedDigits

KEPT_ELEMENTS = 1 << 17
"""So few values stay full digits between micro-batches, 21 MiB: moving them into a window makes the host wait."""


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
    """Exact sums of rows * columns values.

    Attributes:
        digits: int64 [rows * columns, NB], the full form, or None.
        window: [rows, columns] in windowed form, or None; the sum is that of both, zero without either.
    """

    def __init__(self, rows: int, columns: int, device: torch.device, pool: DigitPool | None = None):
        self.rows, self.columns, self.device, self.pool = rows, columns, device, pool or DigitPool()
        self.digits: torch.Tensor | None = None
        self.window: WindowedDigits | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def empty(self) -> bool:
        return self.digits is None and self.window is None

    def open(self) -> torch.Tensor:
        """int64 [elements, NB] to add into."""
        if self.digits is None:
            self.digits = self.pool.zeros(self.elements, self.device)
        return self.digits

    def add_product(self, x: torch.Tensor, w: torch.Tensor) -> None:
        """Adds x @ w.T, of shape [rows, columns], to the window."""
        self.window = gemm_windowed(x, w) if self.window is None else add_gemm_windowed(self.window, x, w)

    def close(self) -> None:
        """Ends a backward pass that others will follow: many full digits move into the window, a few stay."""
        if self.elements > KEPT_ELEMENTS:
            self.settle()

    def settle(self) -> None:
        """The full digits move into the window, where there are windows."""
        if self.digits is None or not windows_on(self.device.type):
            return
        added = WindowedDigits.from_digits(self.digits.view(self.rows, self.columns, NB))
        self.pool.give_back(self.digits)
        self.digits = None
        self.window = added if self.window is None else self.window.add_(added)

    def hold(self) -> None:
        """See `BucketSum.hold`."""
        window = self.window
        words = () if window is None else (window.words, window.base, window.specials)
        for tensor in (self.digits, *words):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def take(self) -> torch.Tensor:
        """int64 [elements, NB], any state: the sums as full digits; the object is empty afterwards."""
        window = self.take_window()
        digits, self.digits = self.digits, None
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
        return window
