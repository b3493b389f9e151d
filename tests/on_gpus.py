"""Every test that needs GPUs, in groups side by side: `python tests/on_gpus.py FOLDER [--seconds N] [GROUP ...]`.

Kernels are compiled first. Groups for one GPU run beside each other on the last GPU; those for several run after them, if
there are several. A line for each group says how it ended, and FOLDER gets its output as it comes. A group that is not
done after N seconds from the start of all is interrupted, with all that it started; the others go on. The exhaustive
groups run only when they are asked for.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS, GRACE_SECONDS = 540, 15
STUCK_SECONDS = 200
"""A test that takes longer has the stacks of its threads written down."""

ONE = "(cuda and not multi_gpu and not exhaustive)"
NEAREST = "tests/cuda/test_elementary_on_gpu.py::test_the_function_is_the_nearest_float_on_all_inputs"

SINGLE = {
    "products": [ONE, "tests/cuda/test_products_on_gpu.py"],
    "calls": [
        ONE,
        "tests/cuda",
        "--ignore=tests/cuda/test_products_on_gpu.py",
        "--ignore=tests/cuda/test_kernels_on_gpu.py",
    ],
    "kernels": [ONE, "tests/cuda/test_kernels_on_gpu.py"],
    "card": [ONE, "tests/claims/test_seed_card.py", "tests/claims/test_exported_kernel.py"],
    "ledger": [ONE, "tests/claims/test_gpu_ledger.py"],
    "fabric": [ONE, "tests/claims/test_fabric.py"],
    "training": [ONE, "tests/claims/test_gpu_training.py"],
}
EXHAUSTIVE = {"nearest": ["cuda and exhaustive", NEAREST], "all inputs": ["cuda and exhaustive", "tests/cuda"]}
SEVERAL = {
    "card of several": ["multi_gpu", "tests/claims/test_seed_card.py"],
    "launches": ["multi_gpu", "tests/claims/test_launches.py"],
    "fabric of several": ["multi_gpu", "tests/claims/test_fabric.py"],
    "training of several": ["multi_gpu", "tests/claims/test_gpu_training.py"],
    "sharded": ["multi_gpu", "tests/claims/test_gpu_ledger.py", "-k", "sharded or fsdp"],
    "ledger of several": ["multi_gpu", "tests/claims/test_gpu_ledger.py", "-k", "not sharded and not fsdp"],
}
COMPILING = {"compiling": [ONE, "tests/cuda/test_kernels_on_gpu.py", "-k", "finalize"]}


def pytest_command(mark: str, *rest: str) -> list[str]:
    """Names each test before it runs, so that the last line of what was ended is the test that did not end."""
    stuck = f"faulthandler_timeout={STUCK_SECONDS}"
    return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", stuck, "-m", mark, *rest]


def run(
    commands: dict[str, list[str]], folder: Path, environment: dict[str, str], ends: float, grace: float = GRACE_SECONDS
) -> dict[str, str]:
    """Runs commands side by side until the moment `ends` of the monotonic clock; how each ended, by its last line."""
    if time.monotonic() > ends:
        return {name: "NOT PASSED: not begun, no time was left" for name in commands}
    environment = {**environment, "PYTHONUNBUFFERED": "1"}
    running, ended = {}, {}
    try:
        for name, command in commands.items():
            with _log(folder, name).open("w", encoding="utf-8") as output:
                # A session of its own: its processes can be ended with it.
                running[name] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_hear_interrupts,
                )
        asked = False
        while running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                process = running.pop(name)
                _signal(process, signal.SIGKILL)  # what it left behind
                ended[name] = _how(folder, name, process.returncode)
                print(f"{name}: {ended[name]}", flush=True)
            if not asked and time.monotonic() > ends:
                asked = True
                for process in running.values():
                    # To pytest alone: it then says what failed so far.
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGINT)
            if time.monotonic() > ends + grace:
                for process in running.values():
                    _signal(process, signal.SIGKILL)
            time.sleep(0.05)
    finally:
        for process in running.values():
            _signal(process, signal.SIGKILL)
    return ended


def _hear_interrupts() -> None:
    """What a shell starts in the background ignores them, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.log"


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _how(folder: Path, name: str, code: int) -> str:
    """Of a group whose tests were all skipped: not passed."""
    lines = _log(folder, name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no output"
    return f"{'passed' if code == 0 and ' passed' in last else 'NOT PASSED'}: {last}"


def main() -> int:
    known = {**SINGLE, **SEVERAL, **EXHAUSTIVE}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "groups", nargs="*", help=f"of {', '.join(known)}; all but the exhaustive ones if none is named"
    )
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="for all groups together")
    given = parser.parse_args()
    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("no GPU is to be seen here")
    unknown = set(given.groups) - set(known)
    if unknown:
        raise SystemExit(f"unknown groups {sorted(unknown)}; there are {list(known)}")
    folder, chosen = given.folder.resolve(), given.groups or [*SINGLE, *SEVERAL]
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    ends = time.monotonic() + given.seconds
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    single = {**environment, "CUDA_VISIBLE_DEVICES": named[count - 1] if named else str(count - 1)}
    stages = [(COMPILING, single), ({**SINGLE, **EXHAUSTIVE}, single), *([(SEVERAL, environment)] if count > 1 else [])]
    last = {}
    for groups, around in stages:
        wanted = groups if groups is COMPILING else {name: each for name, each in groups.items() if name in chosen}
        last |= run({name: pytest_command(*each) for name, each in wanted.items()}, folder, around, ends)
    return int(not all(each.startswith("passed") for each in last.values()))


if __name__ == "__main__":
    sys.exit(main())
