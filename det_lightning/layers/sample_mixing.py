"""Calls that bring the samples of a micro-batch together, or to other places of it: what they give depends on how the global
batch is cut. It may be logged, but not reach a loss.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from det_lightning.layers.call_names import ACROSS, ELEMENTWISE, INTO, LAST, PRODUCTS, TABLES, WHOLE
from det_lightning.layers.sample_places import places_of


class SampleMixing:
    """Of one micro-batch.

    Args:
        samples: of the micro-batch.
        is_constant: whether a tensor is made of no sample, and not made for the samples either, as torch.ones(len(x)) is.
        is_apart: whether it is made of no sample.
    """

    def __init__(self, samples: int, is_constant: Callable[[Tensor], bool], is_apart: Callable[[Tensor], bool]):
        self._samples, self._is_constant, self._is_apart = samples, is_constant, is_apart

    def mixes(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether a call does, by what it is asked for."""
        x = args[0] if args else None
        if self._samples == 1 or not isinstance(x, Tensor):
            return name == "einsum" and self._samples > 1 and any(map(self._other, _tensors(args)))
        held = self._dims(x)
        if name in INTO or name == "setitem":
            return self._mixes_into(name, args, kwargs, held)
        if name in PRODUCTS:
            return self._mixes_in_product(args, held)
        if name in TABLES:
            table = args[TABLES[name]] if len(args) > TABLES[name] else None
            return isinstance(table, Tensor) and table.dim() == 1 and bool(self._other(table))
        if not held:
            return False
        if name == "getitem":
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            return isinstance(first, (Tensor, list)) and not self._is_apart(x)
        if name in WHOLE:
            return True
        if name == "pad":
            sizes = args[1] if len(args) > 1 else kwargs["pad"]
            return any(any(sizes[2 * (x.dim() - 1 - d) : 2 * (x.dim() - d)]) for d in held)
        if name not in ACROSS:
            return False
        dim = _dim(name, args, kwargs)
        if isinstance(dim, Tensor):  # the larger of two
            return False
        if dim is None and name in LAST:
            dim = -1
        dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        return any(d % x.dim() in held for d in dims)

    def pairs(self, name: str, operands: list[Tensor]) -> bool:
        """Whether a call on each element compares samples with samples, as y[:, None] == y does."""
        if self._samples == 1 or name not in ELEMENTWISE or len(operands) < 2:
            return False
        held = [{d - x.dim() for d in self._other(x)} for x in operands if places_of(x) is None]
        held = [places for places in held if places]
        return any(not a & b for a in held for b in held)

    def _mixes_into(self, name: str, args: tuple, kwargs: dict, held: set[int]) -> bool:
        """A call that writes to places of its first operand."""
        if name in ("setitem", "index_put"):
            indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            first = indices[0] if len(indices) else None
            if 0 in held:
                return isinstance(first, Tensor) and first.dtype is not torch.bool and not self._is_apart(first)
            dims = [self._other(index) for index in indices if isinstance(index, Tensor)]
            return any(dims)
        dim = _dim(name, args, kwargs)
        if held:
            return isinstance(dim, int) and dim % max(args[0].dim(), 1) in held
        return any(map(self._other, _tensors((*args[1:], *kwargs.values()))))

    def _mixes_in_product(self, args: tuple, held: set[int]) -> bool:
        """A product of matrices sums over the last dimension of its first operand; batches of matrices stay apart."""
        second = args[1] if len(args) > 1 else None
        if not isinstance(second, Tensor):
            return False
        last = args[0].dim() - 1
        batched = args[0].dim() > 2 and second.dim() > 2
        return last in held or (bool(self._other(second)) and not batched)

    def _dims(self, x: Tensor) -> set[int]:
        """Where the samples lie, as far as can be told: outermost in memory, or else in dimension 0."""
        if x.dim() == 0 or self._samples not in x.shape or self._is_constant(x):
            return set()
        strides = {d: x.stride(d) for d in range(x.dim()) if x.shape[d] > 1}
        outermost = {d for d, stride in strides.items() if stride == max(strides.values())}
        found = {d for d in outermost if x.shape[d] == self._samples}
        return found or ({0} if x.shape[0] == self._samples else set())

    def _other(self, x: Tensor) -> set[int]:
        """The same of an operand that may have as many rows as there are samples by chance."""
        return set() if self._is_apart(x) else self._dims(x)


def _dim(name: str, args: tuple, kwargs: dict) -> object:
    place = ACROSS.get(name, 1)
    return kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))


def _tensors(values: Iterable[object]) -> list[Tensor]:
    found = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else _tensors(value) if isinstance(value, (list, tuple)) else []
    return found
