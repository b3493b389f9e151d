"""Where and with what a result was measured: the part that every file under results/ begins with."""

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")
"""Elsewhere for a machine that gives back one folder alone."""

_PACKAGES = ("torch", "lightning", "numpy", "numba", "scikit-learn", "nvidia-cuda-nvrtc")


def output_of(*command: str) -> str:
    """What a command prints, "unknown" if it fails."""
    try:
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return finished.stdout.strip() if finished.returncode == 0 else "unknown"


def surroundings(device: str, *, commit: str | None = None, **more: str | int) -> dict:
    """The device's name, date, commit and whether the tree had changes, Python and package versions."""
    return {
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "changed_since_commit": bool(output_of("git", "status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        **more,
    }


def keep(path: Path, result: dict) -> None:
    """Write a result as far as it is known: called after each row, so that a run that is ended keeps what it measured."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def processor() -> str:
    """The processor's name, the number of cores this process may use, and the wide integer instructions it has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    field = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in field.get("flags", "").split()]
    model = (
        f"{field.get('model name', platform.machine())} (family {field.get('cpu family')}, model {field.get('model')})"
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {' '.join(wide)}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
