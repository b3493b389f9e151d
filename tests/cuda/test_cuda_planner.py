"""The planner's decisions, without a GPU: counts in, a number of moduli out."""

import pytest

torch = pytest.importorskip("torch")

from det_lightning.kernels.cuda_planner import MAXIMUM_MODULI, Site, first_guess, next_guess  # noqa: E402

SITE = Site(0, 1, 4096, 4096, 4096, torch.float32, torch.float32, "float32")
ELEMENTS = 4096 * 4096


def settle(undecided_with, site: Site = SITE) -> list[int]:
    moduli, seen, history = first_guess(site), {}, []
    for _ in range(30):
        history.append(moduli)
        seen[moduli] = undecided_with(moduli)
        moduli = next_guess(site, moduli, seen)
    return history


def test_moduli_are_dropped_until_the_undecided_cost_more_than_one_modulus():
    history = settle(lambda moduli: 0 if moduli >= 9 else ELEMENTS // 2)
    assert history[-1] == 9 and set(history[-10:]) == {9}


def test_moduli_are_added_while_the_undecided_cost_more():
    history = settle(lambda moduli: 0 if moduli >= 15 else ELEMENTS // 2)
    assert set(history[-10:]) == {15}


def test_where_no_number_of_moduli_helps_the_planner_tries_them_and_takes_the_cheapest():
    history = settle(lambda moduli: ELEMENTS)
    assert MAXIMUM_MODULI in history and set(history[-10:]) == {first_guess(SITE)}


def test_it_does_not_swing_between_two_numbers():
    for few in (0, 10, 1000, 100_000):
        history = settle(lambda moduli, few=few: few * 4 ** max(0, 12 - moduli))
        assert len(set(history[-10:])) == 1, history


def test_moduli_of_the_float64_engine_come_and_go_by_threes():
    site = SITE._replace(engine="float64")
    assert first_guess(site) == 12 and first_guess(site._replace(x=torch.bfloat16, w=torch.bfloat16)) == 9
    for needed, settled in ((9, 9), (10, 12), (13, 15), (16, 12)):
        history = settle(lambda moduli, needed=needed: 0 if moduli >= needed else ELEMENTS // 2, site)
        assert all(moduli % 3 == 0 for moduli in history) and set(history[-10:]) == {settled}
