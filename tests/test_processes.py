"""What the other tests rely on when they start processes: every failure is told, and none is waited for."""

import time

import pytest

from tests.claims.processes import PATIENCE_SECONDS, Failed, on_ranks


class NeverEnds:
    """As a process group whose last holder Python frees while a thread of it waits for Python."""

    def __del__(self):
        time.sleep(10 * PATIENCE_SECONDS)


def raise_beside_it(rank: int, world_size: int, port: int):
    held = NeverEnds()
    raise ValueError(f"planted beside {type(held).__name__}")


def test_an_error_is_told_although_what_its_frames_hold_never_ends():
    with pytest.raises(Failed, match="planted beside NeverEnds"):
        on_ranks(2, raise_beside_it)
