"""What is recorded, and every how many steps: the options that all writers of a ledger share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from det_lightning.errors import InputError
from det_lightning.ledger.record import KINDS
from det_lightning.ledger.retention import Retention

NO_KINDS = ("leaves", "keep_leaves", "keep_leaves_every")
"""What stands beside the kinds in the `recording` of a ledger's header."""


@dataclass(frozen=True)
class RecordingOptions:
    """every: kind -> every how many steps it is recorded. leaves_every: at which of these steps single digests are written
    beside the root. retention: which of those are kept; None: all.
    """

    every: dict[str, int]
    leaves_every: int
    retention: Retention | None

    def is_due(self, kind: str, step: int) -> bool:
        return kind in self.every and step % self.every[kind] == 0

    def due(self, step: int) -> list[str]:
        return [kind for kind in self.every if self.is_due(kind, step)]

    def writes_leaves(self, step: int) -> bool:
        return step % self.leaves_every == 0

    def header(self) -> dict[str, int]:
        """For the environment in a ledger's header, so that a replay records the same."""
        kept = () if self.retention is None else (self.retention.last, self.retention.every or 0)
        return {**self.every, **dict(zip(NO_KINDS, (self.leaves_every, *kept), strict=False))}


def recording_options(
    kinds: Iterable[str] | Mapping[str, int],
    leaves_every_n_steps: int,
    keep_leaves: int | None,
    keep_leaves_every_n_steps: int | None,
) -> RecordingOptions:
    """Checked arguments of a writer. Raises InputError with the name of the one that is wrong."""
    numbers = {
        "leaves_every_n_steps": leaves_every_n_steps,
        "keep_leaves": keep_leaves,
        "keep_leaves_every_n_steps": keep_leaves_every_n_steps,
    }
    for name, number in numbers.items():
        optional = name != "leaves_every_n_steps"
        if (type(number) is not int or number < 1) and not (optional and number is None):
            raise InputError(f"{name} is {number!r}; give a whole number from 1{', or None' if optional else ''}")
    if keep_leaves_every_n_steps is not None:
        if keep_leaves is None:
            raise InputError(
                f"keep_leaves_every_n_steps is {keep_leaves_every_n_steps}, but without keep_leaves all leaves are kept; "
                f"say of how many of the last records to keep them too"
            )
        if keep_leaves_every_n_steps % leaves_every_n_steps:
            raise InputError(
                f"keep_leaves_every_n_steps is {keep_leaves_every_n_steps}, and leaves are written every "
                f"{leaves_every_n_steps} steps; give a multiple"
            )
    retention = None if keep_leaves is None else Retention(keep_leaves, keep_leaves_every_n_steps)
    return RecordingOptions(schedule_of(kinds), leaves_every_n_steps, retention)


def schedule_of(kinds: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """kind -> every how many steps it is recorded. Raises InputError for an unknown kind or an interval below 1."""
    every = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1)
    unknown = sorted(set(every) - set(KINDS))
    if unknown:
        raise InputError(f"a ledger records {', '.join(KINDS)}; it does not know {', '.join(unknown)}")
    for kind, steps in every.items():
        if type(steps) is not int or steps < 1:
            raise InputError(f"{kind} is to be recorded every {steps!r} steps; give a whole number from 1")
    return every
