"""The exchange of one bucket: every rank's exact sums in, the finished gradients out, rounded once.

A generator of stages: it starts a collective, yields the work, and goes on when it is resumed, so that the exchange of
one bucket overlaps the backward pass of the next layers. The stages of a bucket are the same on every rank.

    needs of a window (one small maximum over all ranks) -> per level: reduce-scatter of words -> division and rounding
    of this rank's share -> per level, backwards: all-gather of the finished elements

Where the ranks are more than a word has room for, or the backend moves faster than it adds (gloo), the words travel by
all-to-all and are added up where they arrive. Both sums are of integers, so no order of them moves a bit.

`levels` are process groups from the inside out: [all ranks], or [ranks of this host, ranks of this place on every host];
each share is cut once per level, and only what is added up inside a host travels between hosts.
"""

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.arithmetic.formats import NB
from det_lightning.arithmetic.windowed_digits import HIGHEST_BASE, LOWEST_BASE, MAXIMUM_STATES, words_for
from det_lightning.distributed.bucket_sum import BucketSum
from det_lightning.distributed.buckets import BLOCK
from det_lightning.distributed.local_sum import LocalSum, windows_on
from det_lightning.distributed.transfer import watched
from det_lightning.distributed.waiting import let_go_at_exit, other_ranks
from det_lightning.errors import DetError, InputError
from det_lightning.ops.quotient import det_quotient, odd_part
from det_lightning.ops.window_agreement import agreed_window
from det_lightning.ops.windowed_digits import WindowedDigits, round_parts

Stages = Generator[Any, None, torch.Tensor]
_FAST_INTEGER = 1 << 31

# The second is the first's name until torch 2.12.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange:
    """Exact sums over the ranks of a process group.

    Args:
        group: all ranks that hold a replica; the default group if None. Without one there is one rank.
        levels: process groups whose product is `group`, see the module's head; None for one level.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, levels: Sequence[dist.ProcessGroup] | None = None):
        self.group = group
        self._misfits: list[torch.Tensor] = []
        alone = not (dist.is_available() and dist.is_initialized())
        if not alone and dist.get_backend(group) != dist.Backend.NCCL:
            let_go_at_exit()
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

    def adds_in_transit(self, words: torch.Tensor) -> bool:
        """Whether the backend adds integers as fast as it moves them."""
        return words.is_cuda

    def add(self, integers: torch.Tensor, *, largest: bool = False) -> Any:
        """Starts the sum (or the maximum) of int64 integers over all ranks, in place; a work to wait for, or None."""
        if not self.levels:
            return None
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return dist.all_reduce(integers, op=operation, group=self.group, async_op=True)

    def least(self, integer: int, device: torch.device) -> int:
        """The smallest of the ranks' integers; unlike GPUs would choose unlike buckets. Waits for the ranks."""
        found = torch.tensor([-integer], device=device)
        with other_ranks("they agreed on the size of buckets"):
            work = self.add(found, largest=True)
            if work is not None:
                work.wait()
        return -int(found)

    def stages(self, local: BucketSum, denominator: Callable[[], Fraction], dtype: torch.dtype) -> Stages:
        """Returns [elements] of `dtype`: the sums over all ranks divided by the denominator, rounded once.

        Args:
            local: this rank's sums; empty afterwards.
            denominator: asked when the sums are complete.
        """
        local.hold()
        if not self.levels:
            return _finished(local, denominator(), dtype)
        if not windows_on(local.device.type):
            return (yield from self._exchange_digits(local.take(), denominator, dtype, local.label))
        needs = local.needs()
        yield self.add(needs, largest=True)
        base, facts = agreed_window(needs)
        # One look at the device a bucket: each waits for everything before it.
        special, widest, minus_lowest, highest = facts.tolist()
        if not special and widest < 0:
            return _finished(local, denominator(), dtype)
        if special:
            # Infinities and NaNs are rare; the full form counts them beside the digits.
            return (yield from self._exchange_digits(local.take(), denominator, dtype, local.label))
        words = self.room_for(local.elements // BLOCK, words_for(0, widest), local.device)
        self._misfits += local.fill(base, words)
        edges = -minus_lowest, highest
        return (yield from self.word_stages(words, base, edges, denominator, dtype, label=local.label))

    def room_for(self, blocks: int, words: int, device: torch.device) -> torch.Tensor:
        """int32 [ranks of the first level, words, blocks of a share, BLOCK], what `word_stages` takes; not yet filled."""
        ranks = dist.get_world_size(self.levels[0])
        return torch.empty((ranks, words, blocks // ranks, BLOCK), dtype=torch.int32, device=device)

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
        """As `stages`, from words in normal form of one window on all ranks.

        Args:
            words: int32 [ranks of the first level, count, blocks of a share, BLOCK].
            base: int64 [blocks of all shares].
            edges: its smallest and its largest element.
            label: whose sums these are, for `transfer`.
        """
        states = 1
        for place, level in enumerate(self.levels):
            ranks = dist.get_world_size(level)
            base = base.view(ranks, -1)[dist.get_rank(level)].contiguous()
            if self.adds_in_transit(words) and states * ranks <= MAXIMUM_STATES:
                parts = torch.empty_like(words[:1])
                yield watched(label, parts, words, level, reduce_scatter(parts, words, group=level, async_op=True))
                states *= ranks
            else:
                parts = torch.empty_like(words)
                work = dist.all_to_all_single(parts, words, group=level, async_op=True)
                yield watched(label, parts, words, level, work)
            if place + 1 < len(self.levels):
                if len(parts) > 1:
                    parts, states = parts.sum(dim=0, dtype=torch.int32, keepdim=True), states * ranks
                following = dist.get_world_size(self.levels[place + 1])
                words = parts.view(parts.shape[1], following, -1, BLOCK).transpose(0, 1).contiguous()
        share = _rounded_parts(parts, base, edges, states, denominator(), dtype).view(-1)
        return (yield from self._gather(share))

    def check(self) -> None:
        """Looks whether all sums were inside the windows that their ranks agreed on.

        Raises:
            DetError: one was not, which is a fault of this package.
        """
        misfits, self._misfits = self._misfits, []
        if misfits and bool(torch.cat(misfits).any()):
            raise DetError("a gradient does not fit the window that all ranks agreed on; please report this")

    def _exchange_digits(self, digits: torch.Tensor, denominator, dtype, label: str) -> Stages:
        for level in self.levels:
            received = torch.empty_like(digits)
            work = dist.all_to_all_single(received, digits, group=level, async_op=True)
            yield watched(label, received, digits, level, work)
            digits = received.view(dist.get_world_size(level), -1, NB).sum(dim=0)
        return (yield from self._gather(det_quotient(digits, denominator(), dtype=dtype)))

    def _gather(self, share: torch.Tensor) -> Stages:
        for level in reversed(self.levels):
            whole = torch.empty(len(share) * dist.get_world_size(level), dtype=share.dtype, device=share.device)
            yield all_gather(whole, share.contiguous(), group=level, async_op=True)
            share = whole
        return share


def _finished(local: BucketSum, denominator: Fraction, dtype: torch.dtype) -> torch.Tensor:
    """The quotients of what this rank holds alone."""
    values = [_finished_part(part, denominator, dtype) for part in local.parts]
    return values[0] if len(values) == 1 else torch.cat(values)


def _finished_part(part: LocalSum, denominator: Fraction, dtype: torch.dtype) -> torch.Tensor:
    if part.window is not None:
        part.settle()
        return _rounded(part.take_window(), denominator, dtype).view(-1)
    digits = part.take()
    result = det_quotient(digits, denominator, dtype=dtype)
    part.pool.give_back(digits)
    return result


def _rounded(window: WindowedDigits, denominator: Fraction, dtype: torch.dtype) -> torch.Tensor:
    """RN(window / denominator)."""
    if window.specials is not None:
        return det_quotient(window.to_digits(), denominator, dtype=dtype)
    edges = tuple(torch.stack(torch.aminmax(window.base)).tolist())
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
