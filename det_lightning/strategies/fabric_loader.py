"""The loader that Fabric hands to the user's loop: a training pass cuts the run's order, another shows every sample once."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from det_lightning.distributed.slice_loader import SliceLoader
from det_lightning.errors import UncoveredError
from det_lightning.strategies.covered_tensor import Scope


class Training(Protocol):
    """What a loader asks of the strategy."""

    def is_training(self) -> bool:
        """Whether a pass that begins now trains: gradients are on, and the model is in training mode."""

    def training_loader(self, loader: DataLoader) -> SliceLoader:
        """This rank's slices, from where the run stands."""

    def other_loader(self, loader: DataLoader) -> SliceLoader:
        """This rank's share of a pass that does not train."""

    def begin_pass(self, loader: SliceLoader) -> None:
        """A training pass over what `training_loader` returned begins, at a whole step."""

    def begin_batch(self) -> Scope:
        """A micro-batch was loaded."""


class FabricLoader:
    """The user's DataLoader. `len()` counts the micro-batches of a training epoch on this rank."""

    def __init__(self, loader: DataLoader, strategy: Training):
        self._user_loader, self._strategy = loader, strategy
        self._training: SliceLoader | None = None
        self._other: SliceLoader | None = None

    def __len__(self) -> int:
        return len(self._for_training())

    def __iter__(self) -> Iterator[Any]:
        if self._strategy.is_training():
            yield from self._train()
            return
        if self._other is None:
            self._other = self._strategy.other_loader(self._user_loader)
        yield from self._other

    def _for_training(self) -> SliceLoader:
        if self._training is None:
            self._training = self._strategy.training_loader(self._user_loader)
        return self._training

    def _train(self) -> Iterator[Any]:
        self._strategy.begin_pass(self._for_training())
        for batch in self._training:
            scope = self._strategy.begin_batch()
            yield scope.cover(batch)
            if scope.mode is not None:
                raise UncoveredError(
                    "a batch of the training loader was not put through fabric.backward(loss). Every micro-batch takes "
                    "part in the exact sum, on all ranks: leave samples out in the data set, or with the mask of "
                    "det_lightning.exact_mean(values, mask). A pass that only looks at the batches is one under "
                    "torch.no_grad(), or with the model in eval mode."
                )
