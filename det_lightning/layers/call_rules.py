"""Which of torch's own functions may run as they are in a training step: those that move bits, or round once, and whose
backward passes do too."""

from collections.abc import Callable

from torch import Tensor

from det_lightning.layers.call_names import (
    ACROSS,
    IEEE,
    MOVES,
    MOVES_WITHOUT_GRADIENT,
    SELECTIONS,
    is_basic_index,
)

_BY_INDEX = frozenset("getitem index_select masked_select gather take".split())


class CallRules:
    """The rules of one micro-batch.

    Args:
        is_constant: whether a tensor holds no sample.
        samples: of the micro-batch.
        refusal: makes the error.
    """

    def __init__(self, is_constant: Callable[[Tensor], bool], samples: int, refusal: Callable[..., Exception]):
        self._is_constant, self._samples, self._refusal = is_constant, samples, refusal
        self._picked: dict[
            int, Tensor
        ] = {}  # by identity, held so that it lasts: made of samples that were picked by place

    def check(
        self, name: str, operands: list[Tensor], with_gradient: bool, args: tuple, kwargs: dict, result: object
    ) -> None:
        """Raises UncoveredError unless the call, which gave `result`, has a contract.

        Args:
            with_gradient: an operand carries a gradient.
        """
        carried = getattr(result, "requires_grad", with_gradient)  # expand_as takes only the shape of its other operand
        if name in MOVES or (name in MOVES_WITHOUT_GRADIENT and not carried):
            return
        if name == "getitem" and is_basic_index(args[1]):
            return
        if name == "setitem" and is_basic_index(args[1]) and args[0][args[1]].shape == getattr(args[2], "shape", ()):
            return
        shape = getattr(result, "shape", None)
        spread = with_gradient and any(value.requires_grad and value.shape != shape for value in operands)
        if name in SELECTIONS:
            if spread:
                raise self._refusal(
                    f"{name} with a gradient through a broadcast", "Write y.expand_as(x) for the smaller one."
                )
            return
        if name in IEEE:
            if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
                raise self._refusal(
                    f"{name} with alpha= or rounding_mode=", "Write the multiplication as a step of its own."
                )
            if spread:
                raise self._refusal(
                    f"{name} with a gradient through a broadcast",
                    "Its backward pass adds floats in an order of its own. Only what depends on parameters alone may be "
                    "spread over samples.",
                )
            return
        if name in _BY_INDEX:
            raise self._refusal(
                f"{name} with a gradient",
                "To leave items out of a mean keep them all and say which count: det_lightning.exact_mean(values, mask). To "
                "pick samples do it in the data set.",
            )
        raise self._refusal(name)

    def mixes_samples(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether a call without gradient brings samples of the micro-batch together, or to other places of it."""
        x = args[0] if args else None
        if self._samples == 1 or not self._holds_samples(x):
            return False
        if name == "getitem":
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            return isinstance(first, (Tensor, list))
        if name not in ACROSS:
            return False
        dim = kwargs.get("dim", kwargs.get("dims", args[ACROSS[name]] if len(args) > ACROSS[name] else None))
        if isinstance(dim, Tensor) or name in ("bincount", "nonzero", "histc"):  # a Tensor: the larger of two
            return not isinstance(dim, Tensor)
        if dim is None and name in ("sort", "topk", "argsort"):
            dim = -1
        dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        return any(d % x.dim() == 0 for d in dims)

    def _holds_samples(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self._samples and not self._is_constant(x)
