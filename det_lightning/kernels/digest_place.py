"""Where the elements that a rank holds stand in the whole tensor: what a digest over shards needs to know."""

from typing import NamedTuple


class Place(NamedTuple):
    """Elements in row-major order come in runs of `run`: element e is number first + e // run * stride + e % run of the
    whole. The number of elements is a multiple of `run`.
    """

    first: int
    run: int
    stride: int

    def times(self, words: int) -> "Place":
        """The same where each element is so many."""
        return Place(words * self.first, words * self.run, words * self.stride)


def whole(count: int) -> Place:
    """Of all elements of a tensor with `count`."""
    return Place(0, max(count, 1), max(count, 1))
