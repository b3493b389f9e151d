import pytest

from tests.cli.golden_cases import CASES, GOLDEN, transcript


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_answers_word_for_word_as_in_the_golden_file(beside_ledgers, name):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert transcript(CASES[name]) == expected, "python -m tests.cli.golden_cases rewrites the golden files"


def test_every_golden_file_belongs_to_a_case():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_golden_files_hold_no_path_and_no_time_of_this_machine():
    for path in GOLDEN.glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert "/tmp" not in text and "/home" not in text and "20" + "26-" not in text, path.name
