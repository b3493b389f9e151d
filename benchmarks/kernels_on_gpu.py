"""Checks and times the kernels of `cuda_src/`: `python benchmarks/kernels_on_gpu.py RESULT.json [COMMIT]`.

The result says what ran: device, driver, versions, digest of the kernels, commit, date, tests and times.
"""

import datetime
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cupy as cp  # noqa: E402

from det_lightning.kernels import cuda_compile  # noqa: E402

FLOAT32_CODE = cp.int32(0)
REPEATS = 15


def output_of(*command: str) -> str:
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return finished.stdout.strip() if finished.returncode == 0 else "unknown"


def surroundings(commit: str) -> dict:
    device = cp.cuda.runtime.getDeviceProperties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cuda_src": cuda_compile.source_digest(),
        "device": device["name"].decode(),
        "multiprocessors": device["multiProcessorCount"],
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvrtc": "{}.{}".format(*cuda_compile.nvrtc_version()),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "numba", "cupy-cuda13x")},
    }


def test_outcomes() -> dict:
    """Outcome of every test marked `cuda`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {case.get("name"): next((child.tag for child in case), "passed") for case in cases}
    unsound = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    return {"passed": len(outcomes) - len(unsound), "not_passed": unsound, "names": sorted(outcomes)}


def median_ms(launch, *arguments) -> float:
    """Median time of `launch(*arguments)` by device events, after three launches that do not count."""
    times = []
    for repeat in range(REPEATS + 3):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(cp.cuda.get_elapsed_time(start, end))
    return round(sorted(times)[REPEATS // 2], 4)


def times(folder: Path) -> list[dict]:
    def kernel(source_name: str, kernel_name: str):
        path = folder / f"{source_name}.cubin"
        architecture = f"sm_{cp.cuda.Device().compute_capability}"
        path.write_bytes(cuda_compile.compile_cubin(cuda_compile.SOURCE_FOLDER / source_name, architecture))
        return cp.RawModule(path=str(path)).get_function(kernel_name)

    gemm, partial = kernel("gemm.cu", "gemm"), kernel("gemm.cu", "gemm_partial")
    sum_partial = kernel("reduction.cu", "sum_partial")
    digest = kernel("tensor_digest.cu", "tensor_digest")
    random = cp.random.default_rng(1)
    rows = []
    for m, k, n in ((256, 1024, 256), (1024, 4096, 1024), (96, 64, 96)):
        x, w = (random.standard_normal(shape, dtype=cp.float32) for shape in ((m, k), (n, k)))
        out, digits = cp.empty((m, n), cp.float32), cp.empty((m, n, 21), cp.int64)
        launch = ((m * n + 3) // 4,), (128,)
        sizes = (cp.int64(m), cp.int64(n), cp.int32(k))
        operands = (x, FLOAT32_CODE, w, FLOAT32_CODE)
        no_bias = (cp.uint64(0), FLOAT32_CODE)
        rows.append(
            {
                "product": f"{m}x{k}x{n} float32 standard normal",
                "gemm_ms": median_ms(gemm, *launch, (*operands, *no_bias, out, FLOAT32_CODE, *sizes)),
                "gemm_partial_ms": median_ms(partial, *launch, (*operands, digits, *sizes)),
                "vendor_float32_ms": median_ms(cp.matmul, x, w.T),
            }
        )
    x = random.standard_normal(2**28, dtype=cp.float32)
    copy, lanes, digits = cp.empty_like(x), cp.zeros(2, cp.uint64), cp.zeros(21, cp.int64)
    sum_arguments = (x, FLOAT32_CODE, digits, cp.int64(x.size), cp.int64(1))
    digest_arguments = (x, FLOAT32_CODE, cp.int64(x.size), cp.int64(0), lanes)
    rows.append(
        {
            "tensor": "2^28 float32 standard normal",
            "sum_partial_ms": median_ms(sum_partial, (1, 2112), (256,), sum_arguments),
            "tensor_digest_ms": median_ms(digest, (2112,), (256,), digest_arguments),
            "vendor_sum_ms": median_ms(cp.sum, x),
            "copy_ms": median_ms(cp.copyto, copy, x),
        }
    )
    return rows


def main() -> int:
    target = Path(sys.argv[1])
    result = surroundings(sys.argv[2] if len(sys.argv) > 2 else output_of("git", "describe", "--always", "--dirty"))
    result["tests"] = test_outcomes()
    with tempfile.TemporaryDirectory() as folder:
        result["times"] = times(Path(folder))
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({**result, "tests": {**result["tests"], "names": len(result["tests"]["names"])}}, indent=1))
    return 0 if not result["tests"]["not_passed"] and result["tests"]["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
