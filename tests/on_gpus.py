"""Every test that needs GPUs, in groups side by side: `python tests/on_gpus.py FOLDER [GROUP ...]`.

Kernels are compiled first. Groups for one GPU run beside each other on the last GPU; those for several run after them, if
there are several. A line for each group says how it ended, and FOLDER gets its output. The exhaustive groups run only when
they are asked for.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 540
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


def run(groups: dict[str, list[str]], folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The last line of each group's output."""
    started = {}
    for name, (mark, *rest) in groups.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, *rest]
        output = (folder / f"{name.replace(' ', '-')}.log").open("w", encoding="utf-8")
        started[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    ends, last = time.monotonic() + LIMIT_SECONDS, {}
    for name, process in started.items():
        try:
            process.wait(timeout=max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines = (folder / f"{name.replace(' ', '-')}.log").read_text(encoding="utf-8").strip().splitlines()
        last[name] = f"{'passed' if process.returncode == 0 else 'NOT PASSED'}: {lines[-1] if lines else 'no output'}"
        print(f"{name}: {last[name]}", flush=True)
    return last


def main() -> int:
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("no GPU is to be seen here")
    unknown = set(asked) - {*SINGLE, *SEVERAL, *EXHAUSTIVE}
    if unknown:
        raise SystemExit(f"unknown groups {sorted(unknown)}; there are {[*SINGLE, *SEVERAL, *EXHAUSTIVE]}")
    chosen = asked or [*SINGLE, *SEVERAL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    single = {**environment, "CUDA_VISIBLE_DEVICES": str(count - 1)}
    run({"compiling": [ONE, "tests/cuda/test_kernels_on_gpu.py", "-k", "finalize"]}, folder, single)
    last = run({name: each for name, each in {**SINGLE, **EXHAUSTIVE}.items() if name in chosen}, folder, single)
    if count > 1:
        last |= run({name: each for name, each in SEVERAL.items() if name in chosen}, folder, environment)
    return int(not all(each.startswith("passed") for each in last.values()))


if __name__ == "__main__":
    sys.exit(main())
