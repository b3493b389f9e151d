import pytest

from tests.cli.golden_cases import write_scenario


@pytest.fixture(scope="session")
def ledgers(tmp_path_factory):
    """A directory with the ledgers that the golden cases name; tests leave them as they are."""
    directory = tmp_path_factory.mktemp("ledgers")
    write_scenario(directory)
    return directory


@pytest.fixture
def beside_ledgers(ledgers, monkeypatch):
    """The same, as the working directory, so that no path in an answer depends on the machine."""
    monkeypatch.chdir(ledgers)
    return ledgers
