"""Runs the demonstration and keeps what it printed: `python benchmarks/record_demo.py`, then `readme_tables.py`."""

import json
import subprocess
import sys
import time

from surroundings import RESULTS, ROOT, processor, surroundings

RUNS = {
    "full": ["--picture", "docs/demo.png"],
    "own_split": ["--world", "3", "--micro", "5", "--threads", "7", "--order", "shuffled"],
    "impostor": ["--impostor", "float64"],
    "flip": ["--flip", "secret"],
}


def main() -> None:
    result = surroundings(processor())
    for name, arguments in RUNS.items():
        started = time.monotonic()
        command = [sys.executable, "-m", "det_lightning", "demo", *arguments]
        finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        result[name] = {
            "arguments": arguments,
            "exit_code": finished.returncode,
            "seconds": round(time.monotonic() - started, 1),
            "output": finished.stdout.splitlines(),
        }
        print(f"{name}: exit code {finished.returncode} after {result[name]['seconds']} s", file=sys.stderr)
    path = RESULTS / "demo-cpu.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(path)


if __name__ == "__main__":
    main()
