"""Trainer.predict shows every sample once, in the cut of Lightning, which asserts without a word that each rank has one."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader

from det_lightning.errors import InputError
from det_lightning.layers.call_names import flat


class PredictionCheck:
    """Looks at the loaders of a Trainer's prediction when Lightning has asked for them, and before it cuts them."""

    def __init__(self):
        self._source: Any = None

    def begin(self, trainer: Any) -> None:
        """On every rank, also one that was spawned: what a rank's hook raises is told by every launcher."""
        source = self._source = trainer.predict_loop._data_source

        def dataloader() -> Any:
            self.end()
            loaders = source.dataloader()
            for loader in flat(getattr(loaders, "flattened", loaders)):
                _check_samples(loader, trainer)
            return loaders

        source.dataloader = dataloader  # of this object alone, in place of its class's method

    def end(self) -> None:
        """The Trainer is as it was."""
        if self._source is not None:
            vars(self._source).pop("dataloader", None)
            self._source = None


def _check_samples(loader: object, trainer: Any) -> None:
    """Raises InputError if some rank would have no sample."""
    if not isinstance(loader, DataLoader) or not trainer._data_connector._requires_distributed_sampler(loader):
        return
    samples = len(loader.sampler) if isinstance(loader.sampler, Sized) else 0  # which Lightning refuses itself
    if 0 < samples < trainer.world_size:
        raise InputError(
            f"Trainer.predict got {samples} samples for {trainer.world_size} ranks, and Lightning cuts them so that every "
            f"rank has one at least. Predict with devices={samples} or fewer."
        )
