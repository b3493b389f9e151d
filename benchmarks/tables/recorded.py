"""What benchmarks/results/ holds, and how a page says where it comes from."""

import json

from benchmarks.surroundings import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def origin(result: dict) -> str:
    """One line that says where figures come from."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    driver = f", driver {result['driver']}" if "driver" in result else ""
    return f"{result['device']}{driver}, {result['date'][:10]}, commit {result['commit']}; {versions}"


def block(lines: list[str]) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"
