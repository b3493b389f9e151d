"""Times what is bound by memory on a GPU: `python benchmarks/streams_on_gpu.py RESULT.json [COMMIT]`.

Functions of one variable, their gradients, sums, scatter and windowed digits, each as a share of the bandwidth of a copy of
1 GiB in the same process (bytes read and written over time). CUDA events, medians of nine, float32 unless said.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.surroundings import keep, output_of, surroundings  # noqa: E402
from det_lightning.arithmetic.elementary import DERIVATIVES, FUNCTIONS  # noqa: E402
from det_lightning.arithmetic.formats import BFLOAT16, FLOAT32  # noqa: E402
from det_lightning.kernels import (  # noqa: E402
    cuda_compile,
    cuda_elementary,
    cuda_reduction,
    cuda_scatter,
    cuda_windowed_digits,
)

DEVICE = torch.device("cuda:0")
COUNT = 1 << 28
AIMS = {name: 0.6 for name in ("sqrt", "rsqrt", "sigmoid", "tanh", "exp", "log")}
"""Shares that are aimed at; 0.25 for other functions."""


def median_ms(call, repeats: int = 9) -> float:
    times = []
    for _ in range(2):
        call()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def copy_bandwidth(x: torch.Tensor) -> float:
    """Bytes read and written in a second by a copy of x."""
    copy = torch.empty_like(x)
    return 2 * x.nbytes / (median_ms(lambda: copy.copy_(x)) * 1e-3)


def function_cases(x: torch.Tensor):
    """(name, call, bytes, aim) of every function and gradient, on standard normal data or its magnitudes."""
    positive, half, g = x.abs(), x.bfloat16(), x.flip(0)
    run = cuda_elementary.elementwise
    for name in (name for name in FUNCTIONS if name in DERIVATIVES):
        domain = positive if name in ("log", "log1p", "rsqrt", "sqrt") else x
        yield name, partial(run, name, domain), 2 * x.nbytes, AIMS.get(name, 0.25)
        if name in AIMS:
            narrow = domain.bfloat16()
            yield f"{name} of bfloat16", partial(run, name, narrow, BFLOAT16), 2 * half.nbytes, None
    for name in ("tanh", "sigmoid", "silu", "softplus"):
        slope = DERIVATIVES[name]
        yield f"gradient of {name}", partial(cuda_elementary.gradient, slope, g, x, FLOAT32), 3 * x.nbytes, None


def sum_cases(x: torch.Tensor):
    half = x.bfloat16()
    rows, squares = cuda_reduction.row_states, cuda_reduction.sum_of_squares_state
    yield "sum", lambda: cuda_reduction.sum_states(x.view(1, -1, 1)), x.nbytes, 0.6
    yield "sum of bfloat16", lambda: cuda_reduction.sum_states(half.view(1, -1, 1)), half.nbytes, 0.6
    matrix = x.view(1 << 15, -1)
    yield "sum of each row of 2^13", lambda: rows("sum", matrix), x.nbytes, None
    yield "sum over rows of 2^13", lambda: cuda_reduction.sum_states(matrix.unsqueeze(0)), x.nbytes, None
    yield "sum of squares", lambda: squares(x), x.nbytes, None
    yield "sum of squares of bfloat16", lambda: squares(half), half.nbytes, None
    halves = x.view(2, 1, -1)
    yield "inner product", partial(rows, "products", halves[0], halves[1]), x.nbytes, None


def exact_state_cases(x: torch.Tensor):
    """Sums by index, and windowed digits of four words: read once, written once."""
    rows, width, vocabulary = 1 << 16, 1 << 10, 50304
    source = x[: rows * width].view(rows, width)
    index = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    size = source.nbytes + vocabulary * width * 4
    call = partial(cuda_scatter.index_sum, None, index, source, vocabulary, FLOAT32)
    yield "embedding gradient, 2^16 of 50304 rows", call, size, None
    common = torch.where(torch.arange(rows, device=DEVICE) % 2 == 0, 7, index)
    call = partial(cuda_scatter.index_sum, None, common, source, vocabulary, FLOAT32)
    yield "the same, half of them one row", call, size, None
    words = torch.randint(-(1 << 25), 1 << 25, (2, 4, COUNT >> 3), device=DEVICE, dtype=torch.int32)
    base, out = torch.tensor([-150], device=DEVICE), torch.empty(COUNT >> 3, device=DEVICE)
    for parts in (1, 2):
        for denominator in (1, 3):
            parted = [*words[:parts]]
            call = partial(cuda_windowed_digits.round_sum, parted, base, FLOAT32, denominator, out)
            name = f"rounding {parts} windows of 2^25 by {denominator}"
            yield name, call, parts * words[0].nbytes + out.nbytes, None
    yield "carries of a window", lambda: cuda_windowed_digits.carry(words[0]), 2 * words[0].nbytes, None


def main() -> int:
    commit = sys.argv[2] if len(sys.argv) > 2 else None
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    result = surroundings(torch.cuda.get_device_name(0), commit=commit, driver=driver)
    result["cuda_src"], result["nvrtc"] = cuda_compile.source_digest(), "{}.{}".format(*cuda_compile.nvrtc_version())
    x = torch.randn(COUNT, device=DEVICE)
    result["copy_bytes_per_second"] = bandwidth = copy_bandwidth(x)
    result["rows"] = []
    for cases in (function_cases, sum_cases, exact_state_cases):
        for name, call, size, aim in cases(x):
            took = median_ms(call)
            share = size / (took * 1e-3) / bandwidth
            result["rows"].append({"work": name, "ms": took, "share_of_copy": share, "aim": aim})
            print(f"{name:38} {took:8.3f} ms {100 * share:5.1f} %", flush=True)
            keep(Path(sys.argv[1]), result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
