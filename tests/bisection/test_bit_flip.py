import random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.arithmetic.tensor_digest import lanes, mix
from det_lightning.bisection.bit_flip import digest_delta, find_flipped_bit, mix_words, words_of
from det_lightning.errors import InputError


def delta_between(clean, flipped) -> tuple[int, int]:
    ours, theirs = lanes(map(int, clean)), lanes(map(int, flipped))
    return (theirs[0] - ours[0]) % 2**64, (theirs[1] - ours[1]) % 2**64


@given(place=st.integers(0, 2**40), word=st.integers(0, 2**32 - 1))
def test_words_are_mixed_as_the_definition_mixes_them(place, word):
    lane0, lane1 = mix_words(numpy.array([place], numpy.uint64), numpy.array([word], numpy.uint32))
    assert (int(lane0[0]), int(lane1[0])) == mix(place, word)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    data=st.data(),
)
def test_any_single_flipped_bit_is_found(words, data):
    place, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    clean = numpy.array(words, numpy.uint32)
    flipped = clean.copy()
    flipped[place] ^= numpy.uint32(1 << bit)
    found = find_flipped_bit(clean, delta_between(clean, flipped), dtype="int32")
    assert found == (place, bit)


def test_a_bit_in_a_large_tensor_is_found_beyond_the_first_chunk():
    clean = numpy.random.default_rng(0).integers(0, 2**32, 100_000, dtype=numpy.uint32)
    place, bit = 77_777, 13
    before, after = mix(place, int(clean[place])), mix(place, int(clean[place]) ^ 1 << bit)
    delta = ((after[0] - before[0]) % 2**64, (after[1] - before[1]) % 2**64)
    seen = []
    assert find_flipped_bit(clean, delta, progress=lambda done, total: seen.append(total)) == (place, bit)
    assert len(seen) > 1


def test_what_no_single_bit_explains_is_not_explained():
    rng = random.Random(1)
    clean = numpy.array([rng.getrandbits(30) for _ in range(100)], numpy.uint32)
    two = clean.copy()
    two[3] ^= numpy.uint32(1)
    two[4] ^= numpy.uint32(1)
    assert find_flipped_bit(clean, delta_between(clean, two)) is None
    twice = clean.copy()
    twice[3] ^= numpy.uint32(3)
    assert find_flipped_bit(clean, delta_between(clean, twice)) is None
    assert find_flipped_bit(clean, (0, 0)) is None
    right = delta_between(clean, numpy.where(numpy.arange(100) == 5, clean ^ numpy.uint32(4), clean))
    assert find_flipped_bit(clean, right) == (5, 2)
    assert find_flipped_bit(clean, (right[0], right[1] ^ 1)) is None, "both lanes must agree"
    assert find_flipped_bit(clean[::-1].copy(), right) is None, "the clean tensor must be the right one"
    assert find_flipped_bit(numpy.zeros(0, numpy.uint32), right) is None


@pytest.mark.parametrize(
    ("dtype", "value", "bit"), [("float32", 1.25, 30), ("bfloat16", 0x3FA0, 14), ("float16", 1.25, 14)]
)
def test_a_flip_that_makes_a_nan_is_found_although_digests_see_the_canonical_nan(dtype, value, bit):
    if dtype == "bfloat16":
        clean, nan = numpy.array([1, value, 2], numpy.uint32), 0x7FC0
    else:
        clean = words_of(numpy.array([1, value, 2], dtype))
        nan = 0x7FC00000 if dtype == "float32" else 0x7E00
    digested = clean.copy()
    digested[1] = nan
    assert find_flipped_bit(clean, delta_between(clean, digested), dtype=dtype) == (1, bit)
    assert find_flipped_bit(clean, delta_between(clean, digested), dtype="int32") is None


def test_words_are_the_elements_in_row_major_order():
    assert words_of(numpy.array([[1, 2], [3, 4]], numpy.int32).T).tolist() == [1, 3, 2, 4]
    assert words_of(numpy.array([1.0, -numpy.nan], numpy.float32)).tolist() == [0x3F800000, 0x7FC00000]
    assert words_of(numpy.array([1.0])).tolist() == [0, 0x3FF00000]
    assert words_of(numpy.array([-1], numpy.int8)).tolist() == [0xFF]
    assert words_of(numpy.array([True, False])).tolist() == [1, 0]
    assert words_of(numpy.array([1 + 2j], numpy.complex64)).tolist() == [0x3F800000, 0x40000000]
    assert words_of(numpy.array(1.0, numpy.float32)).tolist() == [0x3F800000]
    assert words_of(numpy.zeros((0, 3), numpy.float32)).tolist() == []
    with pytest.raises(InputError, match="no tensor digest reads dtype"):
        words_of(numpy.zeros(1, numpy.longdouble))


def test_a_delta_is_read_from_two_digests_because_their_keys_cancel():
    one = (5).to_bytes(8, "little") + (7).to_bytes(8, "little")
    other = (4).to_bytes(8, "little") + (9).to_bytes(8, "little")
    assert digest_delta(one, other) == (2**64 - 1, 2)
    with pytest.raises(InputError, match="16 bytes"):
        digest_delta(one, other[:-1])


def test_a_flip_in_a_torch_tensor_is_found_from_its_two_digests():
    torch = pytest.importorskip("torch")
    from det_lightning.ledger.digest import tensor_digest

    clean = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    flipped = clean.clone()
    flipped.view(torch.int32)[3, 17] ^= 1 << 21
    delta = digest_delta(tensor_digest(clean), tensor_digest(flipped))
    assert find_flipped_bit(words_of(clean.numpy()), delta) == (3 * 32 + 17, 21)
