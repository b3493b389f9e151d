"""Windowed digits as tensors: exact sums in a few 32-bit words an element, for accumulation and exchange.

value[e] = 2^base[row of e] * sum over j of words[j, e] * 2^(26 j), beside counts of NaN, +inf and -inf terms.

The words are int32 and signed, with 26 bits in normal form. A plain integer sum over up to 63 ranks therefore cannot
overflow and needs no knowledge of carries: any int32 all-reduce or reduce-scatter adds `words` as they are. Packing 32
bits a word would save a fifth of the bytes but need a kernel of its own at every hop; int64 words would double them.
"""

from collections.abc import Sequence

import torch

from ..arithmetic.formats import DIGITS, NB
from ..arithmetic.windowed_digits import (
    HIGHEST_BASE,
    LOWEST_BASE,
    MAXIMUM_STATES,
    MAXIMUM_WORDS,
    WORD_BITS,
    words_for,
)
from ..errors import InputError
from ..kernels.dispatch import kernels_of
from .digits import check_states, det_combine, det_finalize, output_form


def _rows(shape: Sequence[int]) -> int:
    """Rows share a base: the first dimension of two or more; a vector or a scalar is one row."""
    return shape[0] if len(shape) >= 2 else 1


def window_bounds(digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row int64 (low, high): all its values are multiples of 2^low, smaller in magnitude than 2^high.

    digits: int64 [*shape, NB], any state. A row of zeros has low > high, so that amin and amax over ranks agree on a
    window for all of them.
    """
    check_states("window_bounds", "digits", digits)
    return kernels_of("windowed_digits").bounds(digits.contiguous(), _rows(digits.shape[:-1]))


def window_for(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(base [rows], words) of the smallest window for these bounds; rows of zeros get base 0."""
    empty = low > high
    base = torch.where(empty, 0, low)
    widest = int(torch.where(empty, 0, high - low).max()) if low.numel() else 0
    return base, words_for(0, widest)


class WindowedDigits:
    """Exact sums of one window: `shape`, `base` int64 [rows], `words` int32 [count, *shape], `specials`, `states`.

    A row is an index of the first dimension; a vector or a scalar is one row. `specials` is None or int64 [*shape, 3],
    the counts of NaN, +inf and -inf terms. `states` says how many states in normal form the words are a sum of.
    A window is never a truncation: what does not fit makes it grow.
    """

    def __init__(
        self, base: torch.Tensor, words: torch.Tensor, specials: torch.Tensor | None = None, *, states: int = 1
    ):
        """Takes the tensors as they are. `words` may be a slice of a larger buffer, each words[j] contiguous.

        After a sum of `words` over n ranks, make a new object with states = n times the states of one.
        Raises InputError for tensors that do not belong together.
        """
        self.shape = words.shape[1:]
        self.base, self.words, self.specials, self.states = base, words, specials, states
        self._check()

    def _check(self) -> None:
        words, base, count = self.words, self.base, self.words.shape[0]
        if words.dtype is not torch.int32 or not 1 <= count <= MAXIMUM_WORDS or not words[0].is_contiguous():
            raise InputError(
                f"WindowedDigits: words is {words.dtype} {list(words.shape)} of strides {words.stride()}; it must be "
                f"int32 [count, *shape] with 1 to {MAXIMUM_WORDS} words, each words[j] contiguous"
            )
        if base.dtype is not torch.int64 or base.shape != (_rows(self.shape),) or not base.is_contiguous():
            raise InputError(
                f"WindowedDigits: base is {base.dtype} {list(base.shape)}; for shape {list(self.shape)} it must be "
                f"contiguous int64 [{_rows(self.shape)}]"
            )
        if base.numel() and (int(base.min()) < LOWEST_BASE or int(base.max()) > HIGHEST_BASE):
            raise InputError(
                f"WindowedDigits: base goes from {int(base.min())} to {int(base.max())}; allowed is "
                f"{LOWEST_BASE} to {HIGHEST_BASE}"
            )
        if self.specials is not None and (
            self.specials.dtype is not torch.int64 or self.specials.shape != (*self.shape, NB - DIGITS)
        ):
            raise InputError(f"WindowedDigits: specials must be int64 [*shape, {NB - DIGITS}] or None")
        if not 1 <= self.states <= MAXIMUM_STATES:
            raise InputError(
                f"WindowedDigits: {self.states} states were added; words hold at most {MAXIMUM_STATES} between two "
                f"normalisations; add them in groups"
            )

    @classmethod
    def of_parts(
        cls, base: torch.Tensor, words: torch.Tensor, specials: torch.Tensor | None = None, states: int = 1
    ) -> "WindowedDigits":
        """Of tensors that are known to belong together: looking whether they do would wait for the device."""
        result = object.__new__(cls)
        result.shape, result.base, result.words, result.specials, result.states = (
            words.shape[1:],
            base,
            words,
            specials,
            states,
        )
        return result

    def in_rows_of(self, columns: int) -> "WindowedDigits":
        """The same sums in rows of `columns` elements, into which the rows here can be cut; it shares the words."""
        count, elements = self.words.shape[0], self.shape.numel()
        base = self.base.repeat_interleave(elements // columns // max(1, self.base.numel()))
        specials = None if self.specials is None else self.specials.view(-1, columns, NB - DIGITS)
        return self.of_parts(base, self.words.view(count, -1, columns), specials, self.states)

    def rows(self, chosen: slice) -> "WindowedDigits":
        """Some rows; they share the words."""
        specials = None if self.specials is None else self.specials[chosen]
        return self.of_parts(self.base[chosen], self.words[:, chosen], specials, self.states)

    @classmethod
    def zeros(cls, shape: Sequence[int], base: torch.Tensor, words: int) -> "WindowedDigits":
        """Empty sums in a window of `words` words on the bases [rows]."""
        return cls(base, torch.zeros((words, *shape), dtype=torch.int32, device=base.device))

    @classmethod
    def from_digits(cls, digits: torch.Tensor, base: torch.Tensor | None = None, words: int = 1) -> "WindowedDigits":
        """The values of full digits, int64 [*shape, NB] in any state, in normal form.

        The window is the given one (None: the smallest), grown if a value does not fit it.
        """
        check_states("WindowedDigits.from_digits", "digits", digits)
        shape, digits = digits.shape[:-1], digits.contiguous()
        if base is None:
            base, words = window_for(*window_bounds(digits))
        result = cls.zeros(shape, base, words)
        kernels = kernels_of("windowed_digits")
        if not kernels.from_states(digits, base, result.planes()):
            low, high = window_bounds(digits)
            used = low <= high
            base = torch.where(used, torch.minimum(low, base), base)
            widest = int(torch.where(used, high - base, 0).max())
            result = cls.zeros(shape, base, max(words, words_for(0, widest)))
            kernels.from_states(digits, base, result.planes())
        counts = digits[..., DIGITS:]
        if bool(counts.any()):
            result.specials = counts.clone()
        return result

    def to_digits(self) -> torch.Tensor:
        """The same values as canonical full digits: int64 [*shape, NB]."""
        digits = torch.zeros((*self.shape, NB), dtype=torch.int64, device=self.words.device)
        self.add_to(digits)
        return digits

    def add_to(self, digits: torch.Tensor) -> None:
        """digits += the values, in place; digits: contiguous int64 [*shape, NB] in any state, left canonical."""
        kernels_of("windowed_digits").add_to_states(self.planes(), self.base, digits)
        if self.specials is not None:
            digits[..., DIGITS:] += self.specials

    def normalise_(self) -> "WindowedDigits":
        """Carry in place: every word comes into [-2^25, 2^25), with one more word if the last one is outside."""
        if not kernels_of("windowed_digits").carry(self.planes()):
            self._replace(torch.zeros_like(self.base), self.words.shape[0] + 1)
        self.states = 1
        return self

    def grow_(self, base: torch.Tensor, words: int) -> "WindowedDigits":
        """Move to bases that are the same or lower, [rows], and at least `words` words; the values stay.

        Raises InputError if a base is higher, which would cut bits off.
        """
        lower_by = self.base - base
        if lower_by.numel() and int(lower_by.min()) < 0:
            raise InputError(
                f"WindowedDigits.grow_: a base would rise by {-int(lower_by.min())} bits and cut off what lies below; "
                f"bases may only fall"
            )
        if lower_by.any() or words > self.words.shape[0]:
            most = int(lower_by.max()) if lower_by.numel() else 0
            self.normalise_()
            needed = min(self.words.shape[0] + -(-most // WORD_BITS), MAXIMUM_WORDS)
            self._replace(lower_by, max(words, needed))
        return self

    def _replace(self, lower_by: torch.Tensor, count: int) -> None:
        """Move to other bases; where leading words turn out to hold something, take more."""
        kernels = kernels_of("windowed_digits")
        while count <= MAXIMUM_WORDS:
            out = torch.empty((count, *self.shape), dtype=torch.int32, device=self.words.device)
            if kernels.grow(self.planes(), lower_by, out.view(count, -1)):
                self.base, self.words = self.base - lower_by, out
                self.states = 1
                return
            count += 1
        raise InputError(
            f"WindowedDigits: the sums need more than {MAXIMUM_WORDS} words, which is more than a long accumulator holds"
        )

    def add_(self, other: "WindowedDigits") -> "WindowedDigits":
        """self += other, exactly: word by word in one window; else self grows to the window of both.

        `other` keeps its values; it may be normalised.
        """
        if other.shape != self.shape:
            raise InputError(
                f"WindowedDigits.add_: shapes {list(self.shape)} and {list(other.shape)} differ; only one shape adds up"
            )
        if self.words.shape[0] != other.words.shape[0] or not torch.equal(self.base, other.base):
            base = torch.minimum(self.base, other.base)
            self.grow_(base, other.words.shape[0])
            other = WindowedDigits(other.base, other.words, other.specials, states=other.states)
            other.grow_(base, self.words.shape[0])
            self.grow_(base, other.words.shape[0])
        if self.states + other.states > MAXIMUM_STATES:
            self.normalise_()
            if self.states + other.states > MAXIMUM_STATES or self.words.shape[0] != other.words.shape[0]:
                other.normalise_()
                return self.add_(other)
        self.words += other.words
        self.states += other.states
        if other.specials is not None:
            self.specials = other.specials.clone() if self.specials is None else self.specials + other.specials
        return self

    def round(
        self, *, dtype: torch.dtype = torch.float32, denominator: int = 1, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each value divided by `denominator` and rounded once: the bits of `det_finalize` on the full digits."""
        return round_sum([self], dtype=dtype, denominator=denominator, out=out)

    def planes(self) -> torch.Tensor:
        """The words as [count, elements]; it shares their memory."""
        return self.words.view(self.words.shape[0], -1)


def round_sum(
    parts: Sequence[WindowedDigits],
    *,
    dtype: torch.dtype = torch.float32,
    denominator: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RN(sum of parts / denominator), each element rounded once; one pass over memory if the windows are the same.

    parts: at least one, of one shape; they stay as they are. Returns [*shape] of float32, bfloat16 or float16, in `out`
    if it is given (its dtype counts then). Special values and errors as for `det_finalize`.
    """
    if len(parts) == 0:
        raise InputError("round_sum: pass at least one WindowedDigits")
    shape = parts[0].shape
    if any(part.shape != shape for part in parts) or (out is not None and out.shape != shape):
        shapes = [list(part.shape) for part in parts]
        raise InputError(
            f"round_sum: the parts have shapes {shapes}, out {None if out is None else list(out.shape)}; "
            f"they must be the same"
        )
    if out is None:
        output_form("round_sum", dtype)
        out = torch.empty(shape, dtype=dtype, device=parts[0].words.device)
    form = output_form("round_sum", out.dtype)
    if not _in_one_window(parts) or not isinstance(denominator, int) or not 1 <= denominator < 1 << 31:
        digits = det_combine([part.to_digits() for part in parts])
        return out.copy_(det_finalize(digits, dtype=out.dtype, denominator=denominator))
    planes = [part.planes() for part in parts]
    kernels_of("windowed_digits").round_sum(planes, parts[0].base, form, int(denominator), out)
    counted = [part.specials for part in parts if part.specials is not None]
    if counted:
        counts = torch.stack(counted).sum(dim=0)
        places = counts.any(dim=-1)
        digits = torch.zeros((int(places.sum()), NB), dtype=torch.int64, device=out.device)
        digits[:, DIGITS:] = counts[places]
        out[places] = det_finalize(digits, dtype=out.dtype, denominator=denominator)
    return out


def round_parts(parts: torch.Tensor, base: torch.Tensor, *, dtype: torch.dtype, denominator: int) -> torch.Tensor:
    """RN(sum of parts / denominator), each element rounded once, for words of one window without special values.

    parts: int32 [parts, count, *shape], each parts[i, j] contiguous; base: int64 [rows], within LOWEST_BASE and
    HIGHEST_BASE; 1 <= denominator < 2^31. Returns [*shape] of `dtype`. Nothing here waits for a device: that base and
    words are as they should be is the caller's word.
    """
    form = output_form("round_parts", dtype)
    planes = [part.view(part.shape[0], -1) for part in parts]
    out = torch.empty(parts.shape[2:], dtype=dtype, device=parts.device)
    kernels_of("windowed_digits").round_sum(planes, base, form, denominator, out)
    return out


def _in_one_window(parts: Sequence[WindowedDigits]) -> bool:
    first = parts[0]
    return len(parts) < 1 << 16 and all(
        part.words.shape[0] == first.words.shape[0] and torch.equal(part.base, first.base) for part in parts[1:]
    )
