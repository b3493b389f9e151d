"""Which of torch's own functions may run as they are in a training step: those that move bits, or round once, and whose
backward passes do too."""

from collections.abc import Callable

from torch import Tensor

from det_lightning.layers.call_names import (
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
        refusal: makes the error.
    """

    def __init__(self, refusal: Callable[..., Exception]):
        self._refusal = refusal

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
