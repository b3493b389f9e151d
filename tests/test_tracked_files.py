"""What may stand in no file of the repository: paths of one machine, tracker numbers, package indexes."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Written in pieces, so that this file does not contain what it forbids.
FORBIDDEN = {
    "a path of one workplace": re.compile("/wo" + r"rk/|/tmp/(w|venv)\b|/ro" + r"ot/|/ho" + r"me/\w+/"),
    "a tracker's number without its project": re.compile(r"\biss" + r"ue\s+#?\d+", re.IGNORECASE),
    "a package index": re.compile("pypi" + r"\.org|pythonhosted\.|download\.pytorch\.|index" + "-url|find" + "-links"),
}


def tracked_files() -> list[Path]:
    """What git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def findings(text: str) -> list[str]:
    return [f"{what}: {match.group()!r}" for what, pattern in FORBIDDEN.items() if (match := pattern.search(text))]


def test_no_file_names_a_workplace_a_tracker_or_a_package_index():
    wrong = {}
    for path in tracked_files():
        try:
            found = findings(f"{path.relative_to(ROOT)}\n{path.read_text(encoding='utf-8')}")
        except UnicodeDecodeError:
            continue  # pictures
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "text",
    ["see /wo" + "rk/x", "fixes Iss" + "ue #12", "--find" + "-links=/x", "https://pypi" + ".org/simple"],
)
def test_the_search_finds_what_it_looks_for(text):
    assert len(findings(text)) == 1
