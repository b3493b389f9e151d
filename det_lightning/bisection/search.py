"""The search for the first divergence: a pure function over a probe that may also answer "cannot tell"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What a comparison can say."""

    MATCH = "match"
    DIVERGE = "diverge"
    UNKNOWN = "unknown"


MATCH, DIVERGE, UNKNOWN = Verdict.MATCH, Verdict.DIVERGE, Verdict.UNKNOWN


@dataclass(frozen=True)
class SearchResult:
    """Where the first divergence lies: after `last_match` and not after `first_diverge`.

    verdict: MATCH, all agree; DIVERGE, something differs; UNKNOWN, neither is shown.
    last_match: the highest place known to match, None if none is. first_diverge: the lowest known to diverge,
    None if none is.
    certain: there is no place between the two, so first_diverge is the first.
    """

    verdict: Verdict
    last_match: int | None
    first_diverge: int | None

    @property
    def certain(self) -> bool:
        before = -1 if self.last_match is None else self.last_match
        return self.first_diverge is not None and self.first_diverge == before + 1


def first_divergent(count: int, probe: Callable[[int], Verdict]) -> SearchResult:
    """Search places 0 .. count-1, where everything before some place matches and everything from it on
    diverges.

    Both ends are probed first. An end or a middle that cannot be judged is passed over for the nearest place
    that can. A probe that contradicts the order (a match after a divergence) gives UNKNOWN. No place is
    probed twice; without UNKNOWN there are at most 2 + log2(count) probes, rounded up.
    """
    seen: dict[int, Verdict] = {}

    def judged(places: Iterator[int] | range) -> int | None:
        """The first of `places` that is not UNKNOWN."""
        for place in places:
            if place not in seen:
                seen[place] = probe(place)
            if seen[place] is not UNKNOWN:
                return place
        return None

    last = judged(range(count - 1, -1, -1))
    if last is None:
        return SearchResult(UNKNOWN, None, None)
    first = judged(range(last + 1))
    if seen[last] is MATCH:
        if seen[first] is DIVERGE:
            return SearchResult(UNKNOWN, None, None)
        # what matches at the last place matches everywhere; an unknown place behind it leaves the question
        # open
        return SearchResult(MATCH if last == count - 1 else UNKNOWN, last, None)
    if seen[first] is DIVERGE:
        return SearchResult(DIVERGE, None, first)
    low, high = first, last
    while high - low > 1:
        middle = judged(_outward(low + 1, high - 1))
        if middle is None:
            break
        low, high = (middle, high) if seen[middle] is MATCH else (low, middle)
    return SearchResult(DIVERGE, low, high)


def thinned(first: int, last: int, most: int, marked: Sequence[int] = ()) -> list[int]:
    """At most `most` numbers of first .. last, evenly spread, both ends and the marked ones among them."""
    count = last - first + 1
    if count <= most:
        return list(range(first, last + 1))
    kept = {step for step in marked if first <= step <= last}
    kept |= {first + (count - 1) * i // (most - 1 - len(kept)) for i in range(most - len(kept))}
    return sorted(kept)


def _outward(low: int, high: int) -> Iterator[int]:
    """low .. high, from the middle outward."""
    middle = (low + high) // 2
    yield middle
    for distance in range(1, high - low + 1):
        if middle - distance >= low:
            yield middle - distance
        if middle + distance <= high:
            yield middle + distance
