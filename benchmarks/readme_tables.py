"""Writes the generated parts of README.md and docs/measured.md from benchmarks/results/ and from the code's own tables.

`python benchmarks/readme_tables.py` rewrites them; with `--check` it only says whether they are up to date (exit code 1).
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables.arithmetic import measured_on_cpu, products_on_gpu, streams_on_gpu  # noqa: E402
from benchmarks.tables.demonstrations import bisect, demo, failure  # noqa: E402
from benchmarks.tables.from_code import coverage, seed  # noqa: E402
from benchmarks.tables.measurements import measurements  # noqa: E402
from benchmarks.tables.training import exchange_on_gpus, ledger_costs, training_steps  # noqa: E402

PAGES = {
    "README.md": {
        "failure": failure,
        "demo": demo,
        "bisect": bisect,
        "measurements": measurements,
        "seed": seed,
        "coverage": coverage,
    },
    "docs/measured.md": {
        "cpu": measured_on_cpu,
        "products": products_on_gpu,
        "streams": streams_on_gpu,
        "exchange": exchange_on_gpus,
        "training": training_steps,
        "ledger": ledger_costs,
    },
}


def rewritten(text: str, parts: dict[str, Callable[[], str]]) -> str:
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)", re.DOTALL)
        body = make()
        text, count = pattern.subn(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"a page must hold <!-- generated: {name} --> once, it does {count} times")
    return text


def main() -> int:
    changed = False
    for name, parts in PAGES.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, parts)
        changed |= after != before
        if "--check" not in sys.argv:
            path.write_text(after, encoding="utf-8")
    return int(changed and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
