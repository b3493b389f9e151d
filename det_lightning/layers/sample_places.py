"""Samples that were picked by their place in the micro-batch: they may be worked on, joined again in order, and not mixed.

Which samples lie together in a micro-batch depends on how the global batch is cut. So one of them may not meet another, nor
all of them: h[:6] - h[6:], x - x[0], y == y[0]. Loops over samples are sound: each stays with what belongs to it.
"""

from typing import Any

from torch import Tensor

from det_lightning.layers.call_names import flat

_ATTRIBUTE = "_det_lightning_places"
_JOINS = {"cat": 0, "concat": 0, "concatenate": 0, "stack": 0, "vstack": 0}
_PIECES = frozenset("split chunk unbind narrow select".split())

_POSITIONS = (-1,)  # numbers of the places themselves: torch.arange(len(x))

# The one sample a tensor is made of, or those that its rows are made of.
Places = int | tuple[int, ...]


class SamplePlaces:
    """Follows what was picked of one micro-batch's samples.

    Args:
        samples: of the micro-batch.
        holds_none: whether a tensor is made of no sample.
    """

    def __init__(self, samples: int, holds_none: Any):
        self._samples, self._holds_none = samples, holds_none

    def follow(self, name: str, args: tuple, kwargs: dict, operands: list[Tensor], result: Any) -> bool:
        """Notes which samples the result of a call is made of; whether the call brings samples of unlike places together."""
        made = [value for value in flat(result) if isinstance(value, Tensor)]
        if self._samples == 1 or not made:
            return False
        if name == "arange" and made[0].shape == (self._samples,):
            setattr(made[0], _ATTRIBUTE, _POSITIONS)
            return False
        held = [places_of(value) for value in operands]
        if _POSITIONS in held:
            return self._follow_positions(name, operands, made)
        picked = {places for places in held if places is not None}
        if not picked:
            if operands and self.holds_all(operands[0]):
                self._pick(name, args, kwargs, tuple(range(self._samples)), made)
            return False
        if name in _JOINS and (name == "vstack" or kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0):
            everything = tuple(range(self._samples))
            rows = [_rows(places) if places is not None else everything for places in held]
            self._note(made[0], tuple(row for part in rows for row in part))
            return False
        if len(picked) > 1 or any(self.holds_all(value) for value in operands):
            return True
        (places,) = picked
        if len(operands) > 1 or not (isinstance(places, tuple) and self._pick(name, args, kwargs, places, made)):
            for value in made:
                self._note(value, places)
        return False

    def _follow_positions(self, name: str, operands: list[Tensor], made: list[Tensor]) -> bool:
        """Numbers of places may index samples and be compared along another dimension, but not be joined to the samples."""
        if name == "getitem":
            return False
        rows = [v for v in operands if places_of(v) == _POSITIONS and v.shape[:1] == (self._samples,)]
        aligned = made[0].shape[:1] == (self._samples,) and (
            len(operands) == 1 or any(v.dim() == made[0].dim() for v in rows)
        )
        if aligned and any(self.holds_all(value) for value in operands):
            return True
        if aligned:
            setattr(made[0], _ATTRIBUTE, _POSITIONS)
        return False

    def holds_all(self, x: Tensor) -> bool:
        """Whether dimension 0 holds the samples, as far as can be told: it has their number, and is outermost in memory."""
        if x.dim() == 0 or x.shape[0] != self._samples or places_of(x) is not None or self._holds_none(x):
            return False
        return x.stride(0) == max(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)

    def _pick(self, name: str, args: tuple, kwargs: dict, rows: tuple[int, ...], made: list[Tensor]) -> bool:
        """Notes the places of what a call takes out of rows; False if it takes nothing out."""
        if name == "getitem":
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if not isinstance(first, (int, slice)) or isinstance(first, bool) or len(args[0]) != len(rows):
                return False
            self._note(made[0], rows[first])
            return True
        position = 1 if name in ("unbind", "narrow", "select") else 2
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        if name not in _PIECES or dim != 0 or args[0].shape[0] != len(rows):
            return False
        if name == "select":
            self._note(made[0], rows[args[2] if len(args) > 2 else kwargs["index"]])
        elif name == "unbind":
            for row, value in zip(rows, made, strict=True):
                self._note(value, row)
        else:
            start = (args[2] if len(args) > 2 else kwargs["start"]) if name == "narrow" else 0
            for value in made:
                self._note(value, rows[start : start + len(value)])
                start += len(value)
        return True

    def _note(self, tensor: Tensor, places: Places) -> None:
        setattr(tensor, _ATTRIBUTE, None if places == tuple(range(self._samples)) else places)


def places_of(tensor: Tensor) -> Places | None:
    """Which samples a tensor is made of; None for all of them, or none."""
    return getattr(tensor, _ATTRIBUTE, None)


def _rows(places: Places) -> tuple[int, ...]:
    return (places,) if isinstance(places, int) else places
