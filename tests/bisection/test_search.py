import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.bisection.search import DIVERGE, MATCH, UNKNOWN, SearchResult, first_divergent


def searched(verdicts):
    """The result, and the places probed in order."""
    probed = []

    def probe(place):
        probed.append(place)
        return verdicts[place]

    return first_divergent(len(verdicts), probe), probed


@given(count=st.integers(1, 300), data=st.data())
def test_the_first_divergence_is_found_with_few_probes_and_both_ends_first(count, data):
    first = data.draw(st.integers(0, count))
    result, probed = searched([MATCH] * first + [DIVERGE] * (count - first))
    if first == count:
        assert result == SearchResult(MATCH, count - 1, None)
    else:
        assert result == SearchResult(DIVERGE, first - 1 if first else None, first)
        assert result.certain
    assert set(probed[:2]) == {0, count - 1}
    assert len(probed) == len(set(probed)) <= 2 + math.ceil(math.log2(count))


@given(count=st.integers(1, 60), data=st.data())
def test_places_that_cannot_be_judged_only_widen_the_answer(count, data):
    first = data.draw(st.integers(0, count))
    unknown = data.draw(st.sets(st.integers(0, count - 1)))
    verdicts = [UNKNOWN if i in unknown else MATCH if i < first else DIVERGE for i in range(count)]
    result, probed = searched(verdicts)
    assert len(probed) == len(set(probed))
    known_matches = [i for i, verdict in enumerate(verdicts) if verdict is MATCH]
    known_diverges = [i for i, verdict in enumerate(verdicts) if verdict is DIVERGE]
    if known_diverges:
        assert result == SearchResult(DIVERGE, known_matches[-1] if known_matches else None, known_diverges[0])
        assert result.certain == (result.first_diverge == first and (first == 0 or first - 1 not in unknown))
    elif verdicts[-1] is MATCH:
        assert result == SearchResult(MATCH, count - 1, None)
    else:
        assert result == SearchResult(UNKNOWN, known_matches[-1] if known_matches else None, None)


def test_nothing_to_compare_cannot_be_judged():
    assert searched([])[0] == SearchResult(UNKNOWN, None, None)


def test_a_match_after_a_divergence_is_not_explained_away():
    assert searched([DIVERGE, MATCH])[0] == SearchResult(UNKNOWN, None, None)


def test_an_error_of_the_probe_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        first_divergent(3, lambda place: 1 / 0)


def test_a_probe_that_always_matches_is_seen_to_differ_from_one_that_does_not():
    """Negative control: the search does not find what is not there."""
    assert searched([MATCH] * 5)[0].verdict is MATCH
    assert searched([MATCH] * 4 + [DIVERGE])[0].verdict is DIVERGE
