"""A fraction in limit_val_batches or limit_test_batches is of the samples, so that every split evaluates the same ones."""

from typing import Any


class EvaluationLimits:
    """Those of a Trainer, which the loaders follow instead of Lightning's count of batches."""

    def __init__(self):
        self._given: dict[str, float] = {}  # as the user gave them

    def part(self, trainer: Any) -> float:
        """Of the samples that the evaluation which begins now shows. A number of batches is Lightning's concern."""
        name = "limit_test_batches" if trainer.testing else "limit_val_batches"
        limit = getattr(trainer, name)
        if trainer.predicting or not isinstance(limit, float):
            return 1.0
        if limit != 1.0:
            self._given[name] = limit
            setattr(trainer, name, 1.0)  # Lightning would take the fraction of what is left
        return self._given.get(name, 1.0)

    def give_back(self, trainer: Any) -> None:
        """The Trainer's limits are the user's again."""
        for name, limit in self._given.items():
            setattr(trainer, name, limit)
        self._given = {}
