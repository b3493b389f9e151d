"""The README's figures come from the raw results and from the code, and its digest is the one that the demo expects."""

import subprocess
import sys
from pathlib import Path

from det_lightning.demo import EXPECTED_DIGEST

ROOT = Path(__file__).resolve().parents[1]


def test_the_generated_parts_are_up_to_date():
    command = [sys.executable, "benchmarks/readme_tables.py", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "run python benchmarks/readme_tables.py"


def test_the_digest_in_the_readme_is_the_one_that_the_demo_expects():
    assert f"`{EXPECTED_DIGEST}`" in (ROOT / "README.md").read_text(encoding="utf-8")
