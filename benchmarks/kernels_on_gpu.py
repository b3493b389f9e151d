"""Checks and times the exact products on a GPU: `python benchmarks/kernels_on_gpu.py RESULT.json [COMMIT] [--no-tests]`.

Every product is timed against cuBLAS float32 (TF32 off) on the same operands in the same process, by CUDA events,
medians, after the planner has settled; small ones by replays of a CUDA graph (`ratio`) and by single calls from Python
(`ratio_eager`), where the host's time shows. The times inside are those of torch's profiler. The result says what ran:
device, driver, versions, digest of the kernels, commit, date, tests. Each row is written as it comes, and a part that fails
leaves the others. `streams_on_gpu.py` times what memory bounds.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.surroundings import keep, output_of, surroundings  # noqa: E402
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB  # noqa: E402
from det_lightning.kernels import cuda, cuda_compile, cuda_gemm, cuda_layout, cuda_paths, cuda_planner  # noqa: E402
from det_lightning.ops.gemm_windowed import add_gemm_windowed, gemm_windowed  # noqa: E402
from det_lightning.ops.matmul import det_matmul  # noqa: E402

DEVICE = torch.device("cuda:0")
SETTLING_CALLS = 14
# (data, batches, rows, terms, columns, output, bound of the ratio to cuBLAS float32 or None)
PRODUCTS = [
    ("float32", 1, 256, 1024, 256, "float32", 1.5),
    ("float32", 1, 1024, 4096, 1024, "float32", 1.0),
    ("float32", 1, 4096, 4096, 4096, "float32", 0.65),
    ("float32", 1, 8192, 8192, 8192, "float32", 0.55),
    ("bfloat16", 1, 1024, 4096, 1024, "float32", 0.8),
    ("bfloat16", 1, 4096, 4096, 4096, "float32", None),
    ("bfloat16", 1, 8192, 8192, 8192, "float32", 0.42),
    ("bfloat16", 1, 8192, 8192, 8192, "bfloat16", None),
    ("softmax minus one-hot", 1, 4096, 4096, 4096, "float32", 1.2),
    ("one outlier of 2^20 a row of x", 1, 4096, 4096, 4096, "float32", 1.0),
    ("one outlier of 2^20 a row of x and w", 1, 4096, 4096, 4096, "float32", None),
    ("float32", 96, 1024, 64, 1024, "float32", 2.5),
    ("bfloat16", 96, 1024, 64, 1024, "bfloat16", None),
    ("float32", 96, 1024, 1024, 64, "float32", None),
    ("float32", 1, 4096, 64, 4096, "float32", None),
]
# What bounds a product of each path, as ncu and cycle counters showed on an H200.
BOUNDS = {
    "steps": "int8 tensor cores, 87 % of cycles at 4096^3; else instructions of the conversions, 60 % of issue slots",
    "whole": "latency: conversions, products and rounding one after another, a barrier of the grid between them",
    "short": "instructions and their latency at 16 warps a multiprocessor, 41 % of issue slots",
}
FORMS = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def test_outcomes() -> dict:
    """Outcome of every test marked `cuda`, with the seed of DET_LIGHTNING_TEST_SEED in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda and not exhaustive", "tests/cuda"]
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {case.get("name"): next((child.tag for child in case), "passed") for case in cases}
    unsound = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    seed = os.environ.get("DET_LIGHTNING_TEST_SEED", "0")
    return {"passed": len(outcomes) - len(unsound), "not_passed": unsound, "seed": seed}


def median_ms(call, repeats: int = 15, before=None) -> float:
    """Median time of `call()` by device events, after three calls that do not count; `before()` is not timed."""
    times = []
    for repeat in range(repeats + 3):
        if before:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def queued_ms(call) -> float:
    """As median_ms, with the device busy until the call is queued: without the time that the host takes to begin."""
    return median_ms(call, before=lambda: torch.cuda._sleep(400_000))


def graph_ms(call) -> float:
    """Median time of a replay of `call()`, captured in a CUDA graph ten times over."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return median_ms(graph.replay) / 10


def operands(data: str, batches: int, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    lead = (batches,) if batches > 1 else ()
    x, w = torch.randn(*lead, m, k, device=DEVICE), torch.randn(*lead, n, k, device=DEVICE)
    if data == "bfloat16":
        return x.bfloat16(), w.bfloat16()
    if data == "softmax minus one-hot":
        x = torch.softmax(x, dim=1)
        x[torch.arange(m), torch.randint(k, (m,))] -= 1
    if "outlier" in data:
        x[torch.arange(m), torch.randint(k, (m,))] *= 2.0**20
        if "w" in data.split():
            w[torch.arange(n), torch.randint(k, (n,))] *= 2.0**20
    return x, w


def stages(call, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each of our kernels in one call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    own = [event for event in profile.key_averages() if event.key.startswith(("residue_", "gemm"))]
    return {event.key: event.self_device_time_total / 1e3 / repeats for event in own}


def product_row(data: str, batches: int, m: int, k: int, n: int, output: str, bound: float | None) -> dict:
    x, w = operands(data, batches, m, k, n)
    x32, w32 = x.float(), w.float()
    xb, wb = x.bfloat16(), w.bfloat16()

    def exact():
        return cuda_gemm.gemm(x, w, None, FORMS[output])

    cuda_planner.forget()
    cuda_gemm._known.sites.clear()
    for _ in range(SETTLING_CALLS):
        exact()
        torch.cuda.synchronize()
    (site,) = cuda_gemm._known.sites.values()
    plan, moduli = site.plan, site.plan.moduli
    dtype = getattr(torch, output)
    calls = {
        "exact": exact,
        "det_matmul": lambda: det_matmul(x, w.transpose(-1, -2), dtype=dtype),
        "cublas_float32": lambda: x32 @ w32.transpose(-1, -2),
        "cublas_bfloat16": lambda: xb @ wb.transpose(-1, -2),
    }
    small = m * k * n * batches <= 1 << 33
    row = {"product": f"{batches} x ({m}x{k}x{n})" if batches > 1 else f"{m}x{k}x{n}", "data": data, "output": output}
    row |= {"path": site.path, "moduli": moduli, "undecided": plan.undecided.get(moduli)}
    row["first_guess_moduli"] = cuda_planner.first_guess(plan.site)
    for name, call in calls.items():
        row[f"{name}_ms"] = median_ms(call)
        if small and name != "det_matmul":
            row[f"{name}_graph_ms"] = graph_ms(call)
    suffix = "_graph_ms" if small else "_ms"
    row["ratio"] = row[f"exact{suffix}"] / row[f"cublas_float32{suffix}"]
    row["ratio_eager"] = row["exact_ms"] / row["cublas_float32_ms"]
    row["ratio_det_matmul_eager"] = row["det_matmul_ms"] / row["cublas_float32_ms"]
    row["ratio_to_bfloat16"] = row[f"exact{suffix}"] / row[f"cublas_bfloat16{suffix}"]
    row["bound"], row["met"] = bound, bound is None or row["ratio"] <= bound
    row["stages_ms"] = stages(exact)
    multiplying = ("residue_gemm", "residue_whole", "residue_short", "residue_short_plain")
    inside = max(
        took for name, took in row["stages_ms"].items() if name.startswith(multiplying) and "_conv" not in name
    )
    row["tops"] = 2 * batches * m * k * n * moduli / inside / 1e9
    row["bounded_by"] = BOUNDS[site.path]
    return row


def float64_rows() -> Iterator[dict]:
    """The second engine beside the first, and beside a float64 product of cuBLAS, of which it takes one for three moduli."""
    for data, size in (("float32", 1024), ("float32", 4096), ("bfloat16", 4096)):
        x, w = operands(data, 1, size, 4096, size)
        x32, w32, x64, w64 = x.float(), w.float(), x.double(), w.double()
        calls = {
            "float64_engine": lambda x=x, w=w: cuda_gemm.gemm(x, w, None, FLOAT32, "float64"),
            "int8_engine": lambda x=x, w=w: cuda_gemm.gemm(x, w, None, FLOAT32, "int8"),
            "cublas_float32": lambda x=x32, w=w32: x @ w.t(),
            "cublas_float64": lambda x=x64, w=w64: x @ w.t(),
        }
        cuda_gemm._known.sites.clear()
        for _ in range(SETTLING_CALLS):
            calls["float64_engine"](), calls["int8_engine"]()
            torch.cuda.synchronize()
        moduli = next(site.plan.moduli for site in cuda_gemm._known.sites.values() if site.engine == "float64")
        row = {"work": f"float64 engine {size}x4096x{size}", "data": data, "moduli": moduli}
        row |= {f"{name}_ms": median_ms(call, 7) for name, call in calls.items()}
        row["stages_ms"] = stages(calls["float64_engine"], 3)
        for other in ("int8_engine", "cublas_float32", "cublas_float64"):
            row[f"ratio_to_{other}"] = row["float64_engine_ms"] / row[f"{other}_ms"]
        products = 2 * size * 4096 * size * cuda_layout.groups_of(moduli)
        row["tflops"] = products / row["stages_ms"]["residue_gemm_float64"] / 1e9
        yield row


def windowed_rows() -> Iterator[dict]:
    """Products as digits, against the same product rounded to float32."""
    for data in ("float32", "bfloat16"):
        x, w = operands(data, 1, 4096, 4096, 4096)
        for _ in range(SETTLING_CALLS):
            cuda_gemm.gemm(x, w, None, FLOAT32)
            torch.cuda.synchronize()
        rounded = queued_ms(lambda x=x, w=w: cuda_gemm.gemm(x, w, None, FLOAT32))
        rounded_eager = median_ms(lambda x=x, w=w: cuda_gemm.gemm(x, w, None, FLOAT32))
        total = gemm_windowed(x, w)
        cases = {
            "written": lambda x=x, w=w: gemm_windowed(x, w),
            "added": lambda x=x, w=w, total=total: add_gemm_windowed(total, x, w),
        }
        for name, call in cases.items():
            row = {"work": f"windowed digits {name}, 4096^3", "data": data, "words": total.words.shape[0]}
            row |= {"ms": queued_ms(call), "float32_ms": rounded, "stages_ms": stages(call)}
            row |= {"ratio_to_float32": row["ms"] / rounded, "ratio_eager": median_ms(call) / rounded_eager}
            yield row
        del total
    x, w = operands("float32", 1, 2048, 4096, 2048)
    digits = torch.zeros((2048, 2048, NB), dtype=torch.int64, device=DEVICE)
    for _ in range(SETTLING_CALLS):
        cuda_gemm.add_gemm_digits(digits, x, w)
        torch.cuda.synchronize()
    row = {"work": "add_gemm_digits 2048x4096x2048", "ms": median_ms(lambda: cuda_gemm.add_gemm_digits(digits, x, w))}
    yield row | {"cublas_float32_ms": median_ms(lambda: x @ w.t())}


# Those that were measured before first: a kernel that fails may leave the device unusable.
PARTS = {
    "products": lambda: (product_row(*case) for case in PRODUCTS),
    "digits": windowed_rows,
    "float64": float64_rows,
}


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--no-tests"]
    target, commit = Path(words[0]), words[1] if len(words) > 1 else None
    torch.backends.cuda.matmul.allow_tf32 = False
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    result = surroundings(torch.cuda.get_device_name(0), commit=commit, driver=driver)
    result["cuda_src"], result["nvrtc"] = cuda_compile.source_digest(), "{}.{}".format(*cuda_compile.nvrtc_version())
    cuda.compile_ahead(0, cuda_paths.variants())
    failed = False
    for name, rows in PARTS.items():
        result[name] = []
        try:
            for row in rows():
                result[name].append(row)
                keep(target, result)
                print(json.dumps(row), flush=True)
        except Exception:
            failed = True
            traceback.print_exc()
    if "--no-tests" not in sys.argv:
        result["tests"] = test_outcomes()
    keep(target, result)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
