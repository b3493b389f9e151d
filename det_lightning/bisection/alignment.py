"""Two logs of operations side by side, where one side ran some that the other did not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from det_lightning.bisection.operation_log import Operation

_STRETCHES = ((40, 2), (400, 4), (4000, 8))  # how far ahead, and how many operations in a row have to agree there


def aligned(
    reference: Sequence[Operation], candidate: Sequence[Operation]
) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Both logs side by side; an operation that only one side ran stands alone."""
    i = j = 0
    while i < len(reference) and j < len(candidate):
        if reference[i].identity == candidate[j].identity:
            yield reference[i], candidate[j]
            i, j = i + 1, j + 1
            continue
        ahead = _meeting(reference, candidate, i, j)
        if ahead is None:
            yield reference[i], candidate[j]
            return
        for _ in range(min(ahead)):
            yield reference[i], candidate[j]
            i, j = i + 1, j + 1
        for _ in range(ahead[0] - min(ahead)):
            yield reference[i], None
            i += 1
        for _ in range(ahead[1] - min(ahead)):
            yield None, candidate[j]
            j += 1
    for rest in reference[i:]:
        yield rest, None
    for rest in candidate[j:]:
        yield None, rest


def _meeting(reference, candidate, i: int, j: int) -> tuple[int, int] | None:
    """How far to go on each side until some operations in a row are the same place of the program again: the fewer in all,
    the better; the further they lie ahead, the more of them have to agree."""
    for ahead, in_a_row in _STRETCHES:
        places: dict[tuple, int] = {}
        for skipped in range(min(ahead, len(reference) - i)):
            places.setdefault(_identities(reference, i + skipped, in_a_row), skipped)
        found = [
            (places[stretch] + skipped, places[stretch], skipped)
            for skipped in range(min(ahead, len(candidate) - j))
            if (stretch := _identities(candidate, j + skipped, in_a_row)) in places
        ]
        if found:
            return min(found)[1:]
    return None


def _identities(log: Sequence[Operation], start: int, count: int) -> tuple:
    return tuple(each.identity for each in log[start : start + count])
