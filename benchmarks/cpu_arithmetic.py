"""Times the exact arithmetic on the CPU against stock torch: `python benchmarks/cpu_arithmetic.py [COMMIT]`.

Both sides of a row run in turn, so that what else the machine does falls on both; a row holds medians. A turn is a
burst of calls of at least 20 ms: after a call the stock library's threads spin for milliseconds, which a single short
call of the other side would pay for.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.surroundings import RESULTS, processor, surroundings  # noqa: E402
from det_lightning.kernels.cpu import gemm_int8  # noqa: E402
from det_lightning.ops.dot import det_dot  # noqa: E402
from det_lightning.ops.gemm import det_gemm  # noqa: E402
from det_lightning.ops.reduction import det_sum  # noqa: E402
from det_lightning.ops.windowed_digits import WindowedDigits, round_sum  # noqa: E402

REPEATS, BURST_SECONDS = 7, 0.02
ELEMENTS = 16_000_000


def _burst(run: Callable) -> float:
    """Milliseconds of a call, the mean of a burst."""
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < BURST_SECONDS:
        run()
        calls += 1
    return 1e3 * (time.perf_counter() - begin) / calls


def row(work: str, against: str, target: float | None, ours: Callable, stock: Callable) -> dict:
    """Median times of both in turn, after one turn each that does not count, and the median of their ratios."""
    times: list[tuple[float, float]] = []
    for repeat in range(REPEATS + 1):
        pair = [_burst(ours), _burst(stock)]
        if repeat:
            times.append((pair[0], pair[1]))
    found = {
        "work": work,
        "ratio": round(median(a / b for a, b in times), 2),
        "against": against,
        "ours_ms": round(median(a for a, _ in times), 3),
        "stock_ms": round(median(b for _, b in times), 3),
        "target": target,
    }
    print(
        f"{found['work']:58} {found['ratio']:6.2f} x {against:24} (target {target}; {found['ours_ms']} ms)", flush=True
    )
    return found


def product(m: int, k: int, n: int, dtype: torch.dtype, target: float | None, engine: str = "auto") -> dict:
    generator = torch.Generator().manual_seed(m + k + n)
    x, w = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    stock_x, stock_w = x.float(), w.float().t()
    name = str(dtype).removeprefix("torch.")
    return row(
        f"det_gemm {name} {m}x{k}x{n}, engine {engine}",
        "torch.matmul float32",
        target,
        lambda: det_gemm(x, w, engine=engine),
        lambda: torch.matmul(stock_x, stock_w),
    )


def sums() -> list[dict]:
    x, y = torch.randn(2, ELEMENTS)
    return [
        row("det_sum float32, 16 M", "torch.sum", 3, lambda: det_sum(x), lambda: x.sum()),
        row("det_dot float32, 16 M", "torch.dot", None, lambda: det_dot(x, y), lambda: torch.dot(x, y)),
    ]


def windowed(words: int, target: float | None) -> list[dict]:
    shape, generator = (4000, ELEMENTS // 4000), torch.Generator().manual_seed(words)
    base = torch.randint(-100, -90, shape[:1], generator=generator)
    a, b = (
        WindowedDigits(base, torch.randint(-(2**24), 2**24, (words, *shape), generator=generator, dtype=torch.int32))
        for _ in range(2)
    )
    out, copy = torch.empty(shape), torch.empty_like(a.words)
    what, against = f"windowed digits of {words} words, 16 M", "copy of the same bytes"

    return [
        row(
            f"adding and rounding {what}",
            against,
            target,
            lambda: round_sum([a, b], out=out),
            lambda: copy.copy_(a.words),
        ),
        row(f"adding {what}", against, None, lambda: copy.add_(b.words), lambda: copy.copy_(a.words)),
        row(f"rounding {what}", against, None, lambda: a.round(out=out), lambda: copy.copy_(a.words)),
        row(f"carrying {what}", against, None, lambda: a.normalise_(), lambda: copy.copy_(a.words)),
    ]


def main() -> int:
    int8 = gemm_int8.is_fast()
    rows = [
        product(1024, 4096, 1024, torch.float32, 4 if int8 else None),
        product(1024, 4096, 1024, torch.bfloat16, 3 if int8 else None),
        product(256, 1024, 256, torch.float32, 6),
        product(1024, 4096, 1024, torch.float32, 14, "float64"),
        product(1024, 4096, 1024, torch.bfloat16, None, "float64"),
        product(64, 64, 32, torch.float32, None),
        *sums(),
        *windowed(3, 2),
        *windowed(4, None),
    ]
    commit = sys.argv[1] if len(sys.argv) > 1 else None
    result = surroundings(processor(), commit=commit, threads=torch.get_num_threads(), int8_engine=str(int8))
    result["rows"] = rows
    (RESULTS / "cpu-arithmetic.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
