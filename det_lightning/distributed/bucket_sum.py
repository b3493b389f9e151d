"""What one rank has added up of a bucket: a sum for each parameter that stands apart, and one for all others together."""

from collections.abc import Iterator

import torch

from det_lightning.arithmetic.formats import NB
from det_lightning.distributed.buckets import BLOCK, Bucket
from det_lightning.distributed.local_sum import DigitPool, LocalSum
from det_lightning.ops.gemm import add_gemm_digits
from det_lightning.ops.gemm_windowed import gemm_windowed
from det_lightning.ops.window_agreement import fill_words, needs_of_window, no_needs, refill_words, window_needs


class BucketSum:
    """Exact sums of a bucket's elements.

    Attributes:
        parts: the sums, in the order of the elements.
        label: names of the parameters whose gradients these are.
    """

    def __init__(self, bucket: Bucket, pool: DigitPool, label: str = ""):
        self.elements, self.device, self.label, self._pool = bucket.elements, bucket.device, label, pool
        self._least_apart = bucket.least_apart
        self._apart: dict[int, LocalSum] = {}  # by its first element
        end = 0
        for rows, columns in bucket.apart:
            self._apart[end] = LocalSum(rows, columns, bucket.device, pool)
            end += rows * columns
        self.parts, self._begins = list(self._apart.values()), list(self._apart)
        if end < self.elements:
            self.parts.append(LocalSum((self.elements - end) // BLOCK, BLOCK, bucket.device, pool))
            self._begins.append(end)

    def digits(self, offset: int, shape: torch.Size) -> torch.Tensor:
        """int64 [*shape, NB] of the parameter at this offset, to add into."""
        part = self._apart.get(offset, self.parts[-1])
        first = 0 if offset in self._apart else offset - self._begins[-1]
        return part.open()[first : first + shape.numel()].view(*shape, NB)

    def add_product(self, offset: int, shape: torch.Size, x: torch.Tensor, w: torch.Tensor) -> None:
        """Adds x @ w.T, of this shape, to the sum of the parameter at this offset."""
        if offset in self._apart:
            self._apart[offset].add_product(x, w)
        elif self._least_apart is not None and shape.numel() >= self._least_apart:
            gemm_windowed(x, w).add_to(self.digits(offset, shape))  # full digits of wide rows would be made one by one
        else:
            add_gemm_digits(self.digits(offset, shape), x, w)

    def close(self) -> None:
        """Ends a backward pass that others will follow."""
        for part in self.parts:
            part.close()

    def hold(self) -> None:
        """The current stream of the device reads what another one made: its memory is not free before both are done."""
        for part in self.parts:
            part.hold()

    def take(self) -> torch.Tensor:
        """int64 [elements, NB], any state: the sums as full digits; the object is empty afterwards."""
        taken = [part.take() for part in self.parts]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def needs(self) -> torch.Tensor:
        """The `window_needs` of the sums, a block of BLOCK elements a row."""
        found = [_needs_of(part) for part in self.parts]
        blocks = [len(each) // 2 for each in found]
        high = [each[:count] for each, count in zip(found, blocks, strict=True)]
        low = [each[count:-1] for each, count in zip(found, blocks, strict=True)]
        return torch.cat([*high, *low, torch.cat([each[-1:] for each in found]).amax(dim=0, keepdim=True)])

    def fill(self, base: torch.Tensor, words: torch.Tensor) -> list[torch.Tensor]:
        """Moves the finite sums into `words` on the bases of an agreed window; the object is empty afterwards.

        Args:
            base: int64 [blocks].
            words: int32 [shares, count, blocks of a share, BLOCK].

        Returns:
            int64 [1] each: 1 if a value lies outside the window.
        """
        misfits = []
        for part, begin in zip(self.parts, self._begins, strict=True):
            first, count = begin // BLOCK, part.elements // BLOCK
            window = None if part.window is None else part.take_window().in_rows_of(BLOCK)
            digits = None if part.empty else part.take()
            for share, there, here in _pieces(words, first, count):
                place, own = words[share, :, there], base[first + here.start : first + here.stop]
                if window is not None:
                    misfits.append(refill_words(window.rows(here), own, place))
                elif digits is not None:
                    states = digits.view(-1, BLOCK, NB)[here]
                    misfits.append(fill_words(states, own, place.unsqueeze(0)))
                else:
                    place.zero_()
            if digits is not None:
                self._pool.give_back(digits)
        return misfits


def _needs_of(part: LocalSum) -> torch.Tensor:
    if part.window is not None:
        part.settle()
        return needs_of_window(part.window.in_rows_of(BLOCK))
    if part.digits is not None:
        return window_needs(part.digits.view(-1, BLOCK, NB))
    return no_needs(part.elements // BLOCK, part.device)


def _pieces(words: torch.Tensor, first: int, count: int) -> Iterator[tuple[int, slice, slice]]:
    """(share, its blocks, those of the part) wherever the part's blocks from `first` on lie in one share."""
    size = words.shape[2]
    here = 0
    while here < count:
        share, there = divmod(first + here, size)
        length = min(size - there, count - here)
        yield share, slice(there, there + length), slice(here, here + length)
        here += length
