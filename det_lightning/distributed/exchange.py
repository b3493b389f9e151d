"""The exchange of one bucket: every rank's exact sums in, the finished gradients out, rounded once.

A generator of stages: it starts a collective, yields the work, and goes on when it is resumed, so that the exchange of
one bucket overlaps the backward pass of the next layers. The stages of a bucket are the same on every rank.

    bounds (one small maximum over all ranks) -> per level: all-to-all of words, exact local sum -> division and rounding
    of this rank's share -> per level, backwards: all-gather of the finished elements

`levels` are process groups from the inside out: [all ranks], or [ranks of this host, ranks of this place on every host];
each share is cut once per level, and only what is added up inside a host travels between hosts.
"""

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.arithmetic.formats import DIGITS, NB
from det_lightning.arithmetic.windowed_digits import HIGHEST_BASE, LOWEST_BASE, MAXIMUM_STATES, words_for
from det_lightning.distributed.buckets import BLOCK
from det_lightning.distributed.local_sum import LocalSum, windows_on
from det_lightning.distributed.transfer import all_to_all
from det_lightning.errors import DetError, InputError
from det_lightning.ops.quotient import det_quotient, odd_part
from det_lightning.ops.windowed_digits import WindowedDigits, round_parts, window_bounds

Stages = Generator[Any, None, torch.Tensor]
_FAST_INTEGER = 1 << 31
_NOTHING = -(1 << 40)
"""The bound of a block of zeros, which no block of values reaches."""

# The second is the first's name until torch 2.12.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Exact sums over the ranks of a process group.

    Args:
        group: all ranks that hold a replica; the default group if None. Without one there is one rank.
        levels: process groups whose product is `group`, see the module's head; None for one level.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, levels: Sequence[dist.ProcessGroup] | None = None):
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.levels = [] if alone else list(levels) if levels is not None else [group]
        self.levels = [level for level in self.levels if dist.get_world_size(level) > 1]
        for level in self.levels[:-1]:
            if dist.get_world_size(level) > MAXIMUM_STATES:
                raise InputError(
                    f"an inner level of {dist.get_world_size(level)} ranks: words of {MAXIMUM_STATES} add up without a "
                    f"carry; make the inner groups smaller"
                )

    @property
    def ranks(self) -> int:
        """How many shares a bucket is cut into."""
        product = 1
        for level in self.levels:
            product *= dist.get_world_size(level)
        return product

    def add(self, integers: torch.Tensor, *, largest: bool = False) -> Any:
        """Starts the sum (or the maximum) of int64 integers over all ranks, in place; a work to wait for, or None."""
        if not self.levels:
            return None
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return dist.all_reduce(integers, op=operation, group=self.group, async_op=True)

    def stages(self, local: LocalSum, denominator: Callable[[], Fraction], dtype: torch.dtype) -> Stages:
        """Returns [elements] of `dtype`: the sums over all ranks divided by the denominator, rounded once.

        Args:
            local: this rank's sums; empty afterwards.
            denominator: asked when the sums are complete.
        """
        if not self.levels:
            return _finished(local, denominator(), dtype)
        if not windows_on(local.device.type):
            return (yield from self._exchange_digits(local.take(), denominator, dtype, local.label))
        # Bounds of what this rank holds, so that a maximum over ranks agrees on a window for all of them.
        blocks = local.elements // BLOCK
        agreed = torch.full((2 * blocks + 1,), _NOTHING, dtype=torch.int64, device=local.device)
        agreed[-1] = 0
        digits = None
        if not local.empty:
            digits = local.take()
            low, high = window_bounds(digits.view(blocks, BLOCK, NB))
            used = low <= high
            agreed[:blocks] = torch.where(used, high, _NOTHING)
            agreed[blocks:-1] = torch.where(used, -low, _NOTHING)
            agreed[-1] = int(digits[:, DIGITS:].any())
        yield self.add(agreed, largest=True)
        high, low = agreed[:blocks], -agreed[blocks:-1]
        used = low <= high
        base = torch.where(used, low, 0)
        widest = torch.where(used, high - low, 0).max()
        # One look at the device a bucket: each costs as much as the exchange of a million elements.
        facts = torch.stack([agreed[-1], used.any().long(), widest, base.min(), base.max()]).tolist()
        special, any_used, widest, lowest, highest = facts
        if not special and not any_used:
            return _finished(local, denominator(), dtype)
        if digits is None:
            digits = local.take()
        if special:
            # Infinities and NaNs are rare; the full form counts them beside the digits.
            return (yield from self._exchange_digits(digits, denominator, dtype, local.label))
        words = words_for(0, widest)
        window = WindowedDigits.from_digits(digits.view(blocks, BLOCK, NB), base, words)
        local.pool.give_back(digits)
        del digits
        if window.words.shape[0] != words or window.base is not base:
            raise DetError("a gradient does not fit the window that all ranks agreed on; please report this")
        edges = lowest, highest
        return (yield from self.word_stages(window.words, base, edges, denominator, dtype, label=local.label))

    def word_stages(
        self,
        words: torch.Tensor,
        base: torch.Tensor,
        edges: tuple[int, int],
        denominator: Callable[[], Fraction],
        dtype: torch.dtype,
        *,
        label: str = "",
    ) -> Stages:
        """As `stages`, from words of one window on all ranks: int32 [count, blocks, BLOCK] in normal form.

        Args:
            base: int64 [blocks].
            edges: its smallest and its largest element.
            label: whose sums these are, for `transfer`.
        """
        states = 1
        for level in self.levels:
            ranks = dist.get_world_size(level)
            received = torch.empty_like(words)
            # In each word the blocks of one rank's share lie together: no copy, one collective a word.
            yield [all_to_all(target, word, level, label) for target, word in zip(received, words, strict=True)]
            base = base.view(ranks, -1)[dist.get_rank(level)].contiguous()
            parts = received.view(len(words), ranks, -1, BLOCK).transpose(0, 1)
            if level is not self.levels[-1]:
                words, states = parts.sum(dim=0, dtype=torch.int32), states * ranks
        share = _rounded_parts(parts, base, edges, states, denominator(), dtype).view(-1)
        return (yield from self._gather(share))

    def _exchange_digits(self, digits: torch.Tensor, denominator, dtype, label: str) -> Stages:
        for level in self.levels:
            received = torch.empty_like(digits)
            yield all_to_all(received, digits, level, label)
            digits = received.view(dist.get_world_size(level), -1, NB).sum(dim=0)
        return (yield from self._gather(det_quotient(digits, denominator(), dtype=dtype)))

    def _gather(self, share: torch.Tensor) -> Stages:
        for level in reversed(self.levels):
            whole = torch.empty(len(share) * dist.get_world_size(level), dtype=share.dtype, device=share.device)
            yield _all_gather(whole, share.contiguous(), group=level, async_op=True)
            share = whole
        return share


def _finished(local: LocalSum, denominator: Fraction, dtype: torch.dtype) -> torch.Tensor:
    """The quotients of what this rank holds alone."""
    if local.digits is not None or local.window is None:
        digits = local.take()
        result = det_quotient(digits, denominator, dtype=dtype)
        local.pool.give_back(digits)
        return result
    window, local.window = local.window, None
    return _rounded(window, denominator, dtype).view(-1)


def _rounded(window: WindowedDigits, denominator: Fraction, dtype: torch.dtype) -> torch.Tensor:
    """RN(window / denominator)."""
    if window.specials is not None:
        return det_quotient(window.to_digits(), denominator, dtype=dtype)
    edges = int(window.base.min()), int(window.base.max())
    return _rounded_parts(window.words.unsqueeze(0), window.base, edges, window.states, denominator, dtype)


def _rounded_parts(
    parts: torch.Tensor,
    base: torch.Tensor,
    edges: tuple[int, int],
    states: int,
    denominator: Fraction,
    dtype: torch.dtype,
) -> torch.Tensor:
    """RN(sum of parts / denominator); parts: int32 [parts, count, blocks, BLOCK], words of one window."""
    if denominator > 0:
        # The denominator's powers of two move the base.
        odd, shift = odd_part(denominator)
        if odd < _FAST_INTEGER and edges[0] - shift >= LOWEST_BASE and edges[1] - shift <= HIGHEST_BASE:
            return round_parts(parts, base - shift, dtype=dtype, denominator=odd)
    total = WindowedDigits(base, parts[0], states=states).to_digits()
    for part in parts[1:]:
        total += WindowedDigits(base, part, states=states).to_digits()
    return det_quotient(total, denominator, dtype=dtype)
