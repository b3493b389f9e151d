"""Random numbers of a step: dropout and the functions that are like their argument, from `RandomPlaces`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from det_lightning.layers.loss_terms import LossTerms
from det_lightning.layers.random_places import RandomPlaces
from det_lightning.ops import random_values
from det_lightning.ops.random_calls import random
from det_lightning.ops.random_values import normal, uniform

_DROPOUT = (F.dropout, torch.dropout)
_FEATURE_DROPOUT = (F.dropout1d, F.dropout2d, F.dropout3d)


class RandomFunctions:
    """Replacements of the functions that draw.

    Args:
        path: () -> path of the module that asks.
        is_constant: whether a tensor holds no sample.
        refusal: makes the error.
    """

    def __init__(
        self,
        places: RandomPlaces,
        terms: LossTerms,
        path: Callable[[], str],
        is_constant: Callable[[Tensor], bool],
        refusal: Callable[..., Exception],
    ):
        self._places, self._terms, self._path, self._refusal = places, terms, path, refusal
        self._is_constant = is_constant
        self.replacements: dict[Callable, Callable] = {
            **dict.fromkeys(_DROPOUT, self._dropout),
            **dict.fromkeys(_FEATURE_DROPOUT, self._feature_dropout),
            **dict.fromkeys((torch.rand_like, random.rand_like), partial(self._random, "rand_like", uniform)),
            **dict.fromkeys((torch.randn_like, random.randn_like), partial(self._random, "randn_like", normal)),
            random.randint_like: self._randint_like,
            random.bernoulli_like: self._bernoulli_like,
        }

    def _dropout(self, input, p=0.5, training=True, inplace=False, *, train=None):
        if not (training if train is None else train) or p == 0.0:
            return input
        self._terms.refuse_operands("dropout", (input,))
        if inplace:
            return input.copy_(self._dropout(input, p, True))
        return random_values.dropout(input, self._words(input), float(p))

    def _feature_dropout(self, input, p=0.5, training=True, inplace=False):
        if not training or p == 0.0:
            return input
        self._terms.refuse_operands("dropout", (input,))
        if input.dim() < 3:
            raise self._refusal("dropout of features without [samples, features, ...]", "Use F.dropout.")
        words = self._words(input.detach()[(..., *(0,) * (input.dim() - 2))])
        words = words.view(*input.shape[:2], *(1,) * (input.dim() - 2))
        result = random_values.dropout(input, words, float(p))
        return input.copy_(result) if inplace else result

    def _random(self, name, values_of, x, **kwargs):
        if any(value is not None for key, value in kwargs.items() if key != "requires_grad") or kwargs.get(
            "requires_grad"
        ):
            raise self._refusal(f"{name} with {', '.join(kwargs)}", f"Write det_lightning.random.{name}(x).to(...).")
        if not x.is_floating_point():
            raise self._refusal(f"{name} of {x.dtype}", f"Write det_lightning.random.{name}(x.float()).")
        return values_of(self._words(x)).to(x.dtype)

    def _randint_like(self, x, low, high):
        return random_values.integers(self._words(x), low, high)

    def _bernoulli_like(self, x, p):
        return self._words(x) < round(float(p) * 2**32)

    def _words(self, x: Tensor) -> Tensor:
        if self._is_constant(x):
            raise self._refusal(
                f"random numbers for a constant of shape {list(x.shape)}",
                "Each number belongs to a sample, and a parameter or buffer holds none: draw for a tensor made of samples.",
            )
        return self._places.words(x, self._path(), self._refusal)
