"""Checks and times the CUDA kernels: `python benchmarks/kernels_on_gpu.py RESULT.json [COMMIT] [--no-tests]`.

Every product is timed against cuBLAS float32 (TF32 off) on the same operands in the same process, by CUDA events,
medians, after the planner has settled; small ones by replays of a CUDA graph too, because one launch from Python takes
longer than they do. The result says what ran: device, driver, versions, digest of the kernels, commit, date, tests.
"""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.surroundings import output_of, surroundings  # noqa: E402
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32, NB  # noqa: E402
from det_lightning.kernels import (  # noqa: E402
    cuda,
    cuda_compile,
    cuda_digest,
    cuda_elementary,
    cuda_gemm,
    cuda_planner,
    cuda_reduction,
)

DEVICE = torch.device("cuda:0")
SETTLING_CALLS = 14
# (name, batches, rows, terms, columns, data, output, bound of the ratio to cuBLAS float32 or None)
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
]
FORMS = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def compile_everything() -> None:
    """All cubins at once; NVRTC works in parallel."""
    jobs = [(source, {}) for source in cuda_compile.sources()]
    residues = [cuda_compile.SOURCE_FOLDER / f"{name}.cu" for name in ("residue_convert", "residue_round")]
    jobs += [(source, {"MODULI": n}) for n in range(4, 17) for source in residues]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: cuda.cubin_path(job[0], cuda.architecture(job[0], 0), job[1]), jobs))


def test_outcomes() -> dict:
    """Outcome of every test marked `cuda`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda and not exhaustive", "tests/cuda"]
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {case.get("name"): next((child.tag for child in case), "passed") for case in cases}
    unsound = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    return {"passed": len(outcomes) - len(unsound), "not_passed": unsound}


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


def stages(call) -> dict[str, float]:
    """Milliseconds of each kernel of one call, each timed alone on the call's own memory."""
    tiles, kept = [], []
    launch_all, allocate = cuda_gemm.launch_all, torch.empty

    def record(device, calls):
        tiles.append(calls)
        launch_all(device, calls)

    def keep(*arguments, **more):
        kept.append(allocate(*arguments, **more))
        return kept[-1]

    cuda_gemm.launch_all, torch.empty = record, keep
    try:
        call()
    finally:
        cuda_gemm.launch_all, torch.empty = launch_all, allocate
    result: dict[str, float] = {}
    for calls in tiles:
        for place, one in enumerate(calls):

            def again(before=calls[:place]) -> None:
                launch_all(DEVICE, before)

            again()
            # The rebuilding kernel counts on from what it finds: start its tile over.
            took = median_ms(lambda one=one: launch_all(DEVICE, (one,)), 5, before=again if place == 2 else None)
            result[one.kernel] = result.get(one.kernel, 0.0) + took
    return result


def product_row(data: str, batches: int, m: int, k: int, n: int, output: str, bound: float | None) -> dict:
    x, w = operands(data, batches, m, k, n)
    x32, w32 = x.float(), w.float()
    xb, wb = x.bfloat16(), w.bfloat16()

    def exact():
        return cuda_gemm.gemm(x, w, None, FORMS[output])

    cuda_planner.forget()
    for _ in range(SETTLING_CALLS):
        exact()
        torch.cuda.synchronize()
    (plan,) = cuda_planner._plans.values()
    moduli = plan.moduli
    calls = {
        "exact": exact,
        "cublas_float32": lambda: x32 @ w32.transpose(-1, -2),
        "cublas_bfloat16": lambda: xb @ wb.transpose(-1, -2),
    }
    small = m * k * n * batches <= 1 << 33
    row = {"product": f"{batches} x ({m}x{k}x{n})" if batches > 1 else f"{m}x{k}x{n}", "data": data, "output": output}
    row["moduli"], row["undecided"] = moduli, plan.undecided.get(moduli)
    row["first_guess_moduli"] = cuda_planner.first_guess(plan.site)
    for name, call in calls.items():
        row[f"{name}_ms"] = median_ms(call)
        if small:
            row[f"{name}_graph_ms"] = graph_ms(call)
    suffix = "_graph_ms" if small else "_ms"
    row["ratio"] = row[f"exact{suffix}"] / row[f"cublas_float32{suffix}"]
    row["ratio_eager"] = row["exact_ms"] / row["cublas_float32_ms"]
    row["ratio_to_bfloat16"] = row[f"exact{suffix}"] / row[f"cublas_bfloat16{suffix}"]
    row["bound"], row["met"] = bound, bound is None or row["ratio"] <= bound
    row["stages_ms"] = stages(exact)
    inside = next(took for name, took in row["stages_ms"].items() if name.startswith("residue_gemm"))
    row["tops"] = 2 * batches * m * k * n * moduli / inside / 1e9
    row["capture_checked_moduli"] = plan.moduli
    print(json.dumps(row), flush=True)
    return row


def stream_rows() -> list[dict]:
    """What is bound by memory, as a share of the bandwidth of a copy."""
    x = torch.randn(1 << 28, device=DEVICE)
    copy, positive, half = torch.empty_like(x), x.abs(), x.bfloat16()
    states = torch.randn(1 << 20, 16, device=DEVICE)
    bandwidth = 2 * x.nbytes / median_ms(lambda: copy.copy_(x))
    matrix = x.view(1, 1 << 15, 1 << 13)
    cases = {
        "det_sum of 2^28": (lambda: cuda_reduction.sum_states(x.view(1, -1, 1)), x.nbytes),
        "det_sum of 2^28 bfloat16": (lambda: cuda_reduction.sum_states(half.view(1, -1, 1)), half.nbytes),
        "det_sum over rows, 2^15 x 2^13": (lambda: cuda_reduction.sum_states(matrix), x.nbytes),
        "det_sum of each row, 2^15 x 2^13": (lambda: cuda_reduction.sum_states(matrix.view(1 << 15, -1, 1)), x.nbytes),
        "sum of squares of 2^28": (lambda: cuda_reduction.sum_of_squares_state(x), x.nbytes),
        "digest of 2^28 float32": (lambda: cuda_digest.lanes_tensor(x), x.nbytes),
        "exp of 2^28": (lambda: cuda_elementary.elementwise("exp", x), 2 * x.nbytes),
        "log of 2^28": (lambda: cuda_elementary.elementwise("log", positive), 2 * x.nbytes),
    }
    rows = []
    for name, (call, size) in cases.items():
        took = median_ms(call, 7)
        rows.append({"work": name, "ms": took, "share_of_copy": size / took / bandwidth})
        print(json.dumps(rows[-1]), flush=True)
    digits = torch.zeros((2048, 2048, NB), dtype=torch.int64, device=DEVICE)
    x, w = states.view(4096, 4096)[:2048], states.view(4096, 4096)[2048:]
    for _ in range(SETTLING_CALLS):
        cuda_gemm.add_gemm_digits(digits, x, w)
        torch.cuda.synchronize()
    took = median_ms(lambda: cuda_gemm.add_gemm_digits(digits, x, w))
    rows.append(
        {"work": "add_gemm_digits 2048x4096x2048", "ms": took, "cublas_float32_ms": median_ms(lambda: x @ w.t())}
    )
    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    target = Path(sys.argv[1])
    commit = sys.argv[2] if len(sys.argv) > 2 else None
    torch.backends.cuda.matmul.allow_tf32 = False
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    result = surroundings(torch.cuda.get_device_name(0), commit=commit, driver=driver)
    result["cuda_src"], result["nvrtc"] = cuda_compile.source_digest(), "{}.{}".format(*cuda_compile.nvrtc_version())
    compile_everything()
    if "--no-tests" not in sys.argv:
        result["tests"] = test_outcomes()
    result["products"] = [product_row(*case) for case in PRODUCTS]
    result["streams"] = stream_rows()
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
