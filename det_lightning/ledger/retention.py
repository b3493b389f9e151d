"""How many single digests a ledger keeps: of the last records all, of older ones every so many steps, the rest is dropped.

What will be dropped is written apart from what stays, in *parts*: files that hold the leaves of a few records in a row and
are deleted whole. So nothing that stays is ever written again, and a death within a deletion cannot harm it.
"""

from __future__ import annotations

from dataclasses import dataclass

from det_lightning.errors import InputError

_PARTS = 4


@dataclass(frozen=True)
class Retention:
    """last: of so many newest records all leaves are kept, and of a quarter more at most. every: leaves of steps that it
    divides are kept for good; None: those of step 0 only.

    Raises InputError for numbers below 1.
    """

    last: int
    every: int | None = None

    def __post_init__(self):
        for name, number in (("last", self.last), ("every", self.every)):
            if (type(number) is not int or number < 1) and not (name == "every" and number is None):
                raise InputError(f"{name} of a retention is {number!r}; give a whole number from 1")

    def keeps_for_good(self, step: int) -> bool:
        return step == 0 or (self.every is not None and step % self.every == 0)


class LeafParts:
    """Which part the leaves of the next record go to, and which parts have passed.

    older: parts of an earlier start of the run; their age is not known, so they count as new.
    """

    def __init__(self, retention: Retention | None, older: list[int]):
        self._retention = retention
        self._ages = dict.fromkeys(sorted(older), 0)  # part -> records since its last one
        self._current: tuple[int, int] | None = None  # the part that grows, records since it began

    def part_of(self, step: int, position: int) -> int | None:
        """Of the leaves of `step`: None if they stay for good. position: of the line that is written next; it names a
        part that begins here."""
        if self._retention is None or self._retention.keeps_for_good(step):
            return None
        if self._current is not None and self._current[1] < max(1, self._retention.last // _PARTS):
            return self._current[0]
        return position

    def recorded(self, part: int | None) -> list[int]:
        """To be called after each record with the part its leaves went to; the parts that may go now, the oldest first."""
        if part is not None and (self._current is None or self._current[0] != part):
            if self._current is not None:
                self._ages[self._current[0]] = 0
            self._current = part, 0
        if self._current is not None:
            self._current = self._current[0], self._current[1] + 1
        for each in self._ages:
            self._ages[each] += 1
        passed = [
            each for each, age in self._ages.items() if self._retention is not None and age >= self._retention.last
        ]
        for each in passed:
            del self._ages[each]
        return passed
