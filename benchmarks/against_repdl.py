"""Times `det_gemm` beside RepDL's CPU product: `python benchmarks/against_repdl.py CHECKOUT [COMMIT]`.

CHECKOUT is a clone of https://github.com/microsoft/RepDL; its product is built from its own source with the options of
its own setup.py. Needs a C++ compiler. RepDL fixes an order of fused multiply-adds: reproducible, with an error that
grows with the number of terms. `det_gemm` rounds the exact sum once.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils.cpp_extension import load  # noqa: E402

from benchmarks.surroundings import RESULTS, processor, surroundings  # noqa: E402
from det_lightning.ops.gemm import det_gemm  # noqa: E402

SIDE, REPEATS, BURST_SECONDS = 1024, 3, 0.5
BINDING = """#include <torch/extension.h>
void bind_matrix_multiplication(py::module_ &m);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { bind_matrix_multiplication(m); }
"""


def repdl_product(checkout: Path):
    """RepDL's `mm(x, y, transA, transB)` on CPU tensors."""
    with TemporaryDirectory() as folder:
        binding = Path(folder) / "binding.cpp"
        binding.write_text(BINDING, encoding="utf-8")
        sources = [str(checkout / "backend" / "cpu" / "matrix_multiplication.cpp"), str(binding)]
        return load("repdl_cpu_product", sources, extra_cflags=["-fopenmp"], build_directory=folder).mm


def seconds(run) -> float:
    """Seconds of a call: the mean of a burst after one call that wakes threads and memory which were idle for long."""
    run()
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < BURST_SECONDS:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def main() -> int:
    theirs = repdl_product(Path(sys.argv[1]).resolve())
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, SIDE, SIDE, generator=generator)
    exact = x.double() @ w.double().t()
    runs = {"repdl": lambda: theirs(x, w, False, True), "det_gemm": lambda: det_gemm(x, w), "torch": lambda: x @ w.t()}
    errors = {
        name: float(((run().double() - exact) / exact.abs().clamp(min=1.0)).abs().max()) for name, run in runs.items()
    }
    times = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            times[name].append(seconds(run))
            print(f"{name:9} {1e3 * times[name][-1]:9.1f} ms", flush=True)
    result = surroundings(
        processor(), commit=sys.argv[2] if len(sys.argv) > 2 else None, threads=torch.get_num_threads(), side=SIDE
    )
    result["rows"] = [
        {
            "work": f"{name} float32 {SIDE}x{SIDE}x{SIDE}",
            "ms": round(1e3 * median(times[name]), 1),
            "repdl_over_this": round(median(a / b for a, b in zip(times["repdl"], times[name], strict=True)), 1),
            "largest_error": errors[name],
        }
        for name in runs
    ]
    (RESULTS / "against-repdl.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["rows"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
