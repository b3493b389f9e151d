"""The digest lanes: order counts, sharding does not, and the mixes are those written down."""

import random

from det_lightning.arithmetic.formats import BFLOAT16, FLOAT64
from det_lightning.arithmetic.tensor_digest import lanes, mix, words_of

MASK = (1 << 64) - 1


def test_the_first_lane_is_the_finaliser_of_splitmix64():
    # The first output of splitmix64 from seed 0 is its finaliser applied to the golden ratio, here place 2^64 / phi.
    golden = 0x9E3779B97F4A7C15
    place, bits = golden >> 32, golden & 0xFFFFFFFF
    assert mix(place, bits)[0] == 0xE220A8397B1DCDAF


def test_lanes_of_shards_add_up():
    words = [random.Random(1).getrandbits(32) for _ in range(100)]
    whole = lanes(words)
    left, right = lanes(words[:37]), lanes(words[37:], first_place=37)
    assert whole == ((left[0] + right[0]) & MASK, (left[1] + right[1]) & MASK)


def test_order_counts():
    assert lanes([1, 2]) != lanes([2, 1])
    assert lanes([0, 0]) != lanes([0])


def test_places_beyond_2_to_the_32_differ_from_those_below():
    assert mix(1 << 32, 5) != mix(0, 5)
    assert mix((1 << 32) + 7, 5) != mix(7, 5)


def test_words_are_little_end_first_and_nans_canonical():
    assert words_of([0x1122334455667788], 64) == [0x55667788, 0x11223344]
    assert words_of([0xFFF0000000000001], 64, FLOAT64) == [0, 0x7FF80000]
    assert words_of([0xFFC1, 0x7F80], 16, BFLOAT16) == [0x7FC0, 0x7F80]
