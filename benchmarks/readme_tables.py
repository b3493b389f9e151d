"""Writes the generated parts of README.md and docs/measured.md from benchmarks/results/ and from the code's own tables.

`python benchmarks/readme_tables.py` rewrites them; with `--check` it only says whether they are up to date (exit code 1).
"""

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def origin(result: dict) -> str:
    """One line that says where figures come from."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    driver = f", driver {result['driver']}" if "driver" in result else ""
    return f"{result['device']}{driver}, {result['date'][:10]}, commit {result['commit']}; {versions}"


def failure() -> str:
    return (
        "![Loss curves of one training under ddp and det, and how far other splits are from the first]"
        "(docs/demo.png)\n\n*Left: the same training under both strategies. Right: how far five other splits of each are "
        "from the first, step by step. Drawn by `det-lightning demo`.*"
    )


def demo() -> str:
    result = load("demo-cpu.json")
    lines = [line.rstrip() for line in result["full"]["output"] if not line.startswith("picture")]
    digest = lines[-1].split()[-1]
    return (
        f"`det-lightning demo` trains the network in twelve ways and ends with the SHA-256 of the weights that it expects "
        f"on every machine:\n\n`{digest}`\n\n"
        + block(lines)
        + f"\n\n<sub>{result['full']['seconds']:.0f} s. {origin(result)}</sub>\n\n"
        + "Your own split, with the weights in a file that `sha256sum` agrees on, and an impostor that sums in float64:\n\n"
        + "```bash\ndet-lightning demo --world 3 --micro 5 --threads 7 --order shuffled --export weights.f32\n"
        + "det-lightning demo --impostor float64    # ends in other weights, exit code 1\n```"
    )


def bisect() -> str:
    result = load("demo-cpu.json")
    return (
        "`det-lightning demo --flip secret` flips one bit of one weight at a place that is drawn in another process, and "
        "finds it from the two ledgers:\n\n" + block(result["flip"]["output"]) + f"\n\n<sub>{origin(result)}</sub>\n\n"
        "With `--replay` the step is run again on both sides, twice, down to the first operation that differs; `--html` and "
        "`--png` write a report. Here one pixel of one sample was changed (`examples/digits.py --pixel 700`):\n\n"
        "![Loss curves of two runs, their distance, the tensors that agree and differ at every step, and the pixel that was "
        "changed](docs/bisect.png)\n\n"
        "[docs/bisect.md](docs/bisect.md) goes on: checkpoints of stock Lightning, two versions of the code, `git bisect`, "
        "guards that stop a run, golden runs for continuous integration."
    )


PRODUCTS = {  # of benchmarks/results/kernels-h200.json, in the README: what is aimed at
    "float32 256x1024x256, float32 out": 1.5,
    "float32 1024x4096x1024, float32 out": 1.0,
    "float32 4096x4096x4096, float32 out": 0.65,
    "float32 8192x8192x8192, float32 out": 0.55,
    "bfloat16 1024x4096x1024, float32 out": 0.8,
    "bfloat16 8192x8192x8192, float32 out": 0.42,
    "float32 96 x (1024x64x1024), float32 out": 2.5,
}


def measurements() -> str:
    """What people ask first; docs/measured.md has the rest."""
    cpu, gpu, exchange = load("cpu-arithmetic.json"), load("kernels-h200.json"), load("reducer-on-gpus.json")
    found = {f"{row['data']} {row['product']}, {row['output']} out": row["ratio"] for row in gpu["products"]}
    rows = [("CPU", row["work"], row["against"], row["ratio"], row["target"]) for row in cpu["rows"] if row["target"]]
    rows += [("GPU", work, "cuBLAS float32", found[work], aimed) for work, aimed in PRODUCTS.items()]
    rows += [("GPUs", row["work"], row["against"], row["ratio"], row["target"]) for row in exchange["rows"][::2]]
    step = load("ledger-h200.json")["recording"]
    share = round(1 + step["ledger_overhead_percent"] / 100, 3)
    rows.append(("GPU", "training step of GPT-2 small with a ledger of all kinds", "the step without", share, 1.02))
    return (
        "Time as a multiple of the stock operation's in the same process, beside what is aimed at. "
        "[docs/measured.md](docs/measured.md) has every line that was measured, with devices and versions; "
        "[docs/cpu.md](docs/cpu.md) and [docs/cuda.md](docs/cuda.md) say how it works and what bounds it.\n\n"
        "| on | work | beside | ratio | aim |\n|---|---|---|---|---|\n"
        + "\n".join(f"| {on} | {work} | {beside} | {ratio:.3g} | {aimed} |" for on, work, beside, ratio, aimed in rows)
        + f"\n\n<sub>CPU: {cpu['device']}. GPU: {gpu['device']}. GPUs: {exchange['device']}.</sub>"
    )


def measured_on_cpu() -> str:
    cpu, repdl = load("cpu-arithmetic.json"), load("against-repdl.json")
    theirs, ours = repdl["rows"][0], repdl["rows"][1]
    rows = [f"| {row['work']} | {row['ratio']:.1f} | {row['target'] or ''} | {row['against']} |" for row in cpu["rows"]]
    return (
        "Time as a multiple of the stock operation in the same process, medians of seven.\n\n"
        "| work | ratio | aim | against |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(cpu)}</sub>\n\n"
        + f"Beside RepDL's reproducible CPU product, {theirs['work'].removeprefix('repdl ')}: `det_gemm` is "
        f"{ours['repdl_over_this']:.0f} times as fast, with a largest error of {ours['largest_error']:.1e} instead of "
        f"{theirs['largest_error']:.1e} (relative to the exact value or to 1).\n\n<sub>{origin(repdl)}</sub>"
    )


def products_on_gpu() -> str:
    result = load("kernels-h200.json")
    rows = [
        f"| {row['data']} {row['product']}, {row['output']} out | {row['path']} | {row['moduli']} | {row['ratio']:.2f} "
        f"| {row['bound'] or ''} | {row['ratio_eager']:.2f} | {row['ratio_det_matmul_eager']:.2f} "
        f"| {row['ratio_to_bfloat16']:.1f} | {row['tops']:.0f} |"
        for row in result["products"]
    ]
    windows = [
        f"| {row['data']}, {row['work'].split()[2].rstrip(',')} | {row['words']} | {row['ratio_to_float32']:.2f} | "
        f"{row['ratio_eager']:.2f} |"
        for row in result["digits"]
        if "ratio_to_float32" in row and "data" in row
    ]
    other_engine = [
        f"| {row['data']} {row['work'].split()[2]} | {row['moduli']} | {row['ratio_to_int8_engine']:.1f} | "
        f"{row['ratio_to_cublas_float32']:.1f} | {row['ratio_to_cublas_float64']:.1f} | {row['tflops']:.0f} |"
        for row in result["float64"]
    ]
    tests = result["tests"]
    return (
        "Time as a multiple of cuBLAS float32 (TF32 off) in the same process, small products as replays of a CUDA graph; "
        "the columns after it are single calls from Python, of the kernels and of `det_matmul` with its checks. "
        f"{tests['passed']} tests compared bytes with the CPU, {len(tests['not_passed'])} failed.\n\n"
        "| product | path | moduli | ratio | aim | single | `det_matmul` | of cuBLAS bfloat16 | int8 TOPS inside |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n| windowed digits of a 4096^3 product | words | times the float32 product (aim 1.15) | single calls |\n"
        "|---|---|---|---|\n"
        + "\n".join(windows)
        + "\n\n| the float64 engine instead of int8 | moduli | times int8 | times cuBLAS float32 | times cuBLAS float64 | "
        "TFLOP/s |\n|---|---|---|---|---|---|\n" + "\n".join(other_engine) + f"\n\n<sub>{origin(result)}</sub>"
    )


def streams_on_gpu() -> str:
    result = load("streams-h200.json")
    rows = [f"| {row['work']} | {100 * row['share_of_copy']:.0f} % | {aim(row['aim'])} |" for row in result["rows"]]
    return (
        "Bytes read and written over time, as a share of what a copy of 1 GiB reaches in the same process; 2^28 float32 "
        "numbers unless said.\n\n| operation | of a copy | aim |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def exchange_on_gpus() -> str:
    result = load("reducer-on-gpus.json")
    rows = [
        f"| {row['work']} | {row['ratio']} | {row['target']} | {row['ours_ms']} ms | {row['moving_alone_ms']} ms "
        f"| {row['stock_ms']} ms |"
        for row in result["rows"]
    ]
    return (
        "Beside one NCCL all-reduce of the same number of float32 elements, which rounds at every addition.\n\n"
        "| work | ratio | aim | exact | its collectives alone | NCCL |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def training_steps() -> str:
    result = load("training-step-gpu.json")
    rows = [
        f"| {row['work']} | {row['ratio']} | {row['ours_ms']} ms | {row['stock_ms']} ms | {row['memory_GB']} GB |"
        for row in result["rows"]
    ]
    return (
        '`strategy="det"` beside `strategy="auto"` in float32 on one GPU, by the clock, the loading of batches included in '
        "both.\n\n| work | ratio | det | auto | most memory |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def ledger_costs() -> str:
    gpu, cpu, guard = load("ledger-h200.json"), load("ledger-cpu.json"), load("fault-guard-cpu.json")
    recording, aims = gpu["recording"], gpu["aims"]
    rows = [
        f"| {row['tensors']} | {row['share_of_copy_percent']} % | {row['digest_GB_per_s']} GB/s |"
        for row in gpu["digests"]
    ]
    commands = ", ".join(f"`{name}` {found['median_s']:.1f} s" for name, found in cpu["commands"].items())
    return (
        f"A step of {recording['model']}, {recording['batch']}, {recording['digested_bytes_a_step'] / 1e9:.1f} GB digested: "
        f"with a ledger of all kinds {recording['ledger_overhead_percent']} % longer (aim "
        f"{aims['ledger_overhead_percent']} %), with roots alone {recording['ledger_of_roots_overhead_percent']} %.\n\n"
        f"| digests of | of a copy's bandwidth (aim {aims['digest_share_of_copy_percent']} %) | rate |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(gpu)}</sub>\n\n"
        f"Two ledgers of {cpu['ledgers']['steps']:,} steps of {cpu['ledgers']['tensors']} tensors that part in the middle: "
        f"{commands}, the start of the interpreter included (aim 2 s). Digests on one CPU core: "
        f"{cpu['digest']['memory_GB_per_s']} GB/s from memory, {cpu['digest']['cache_GB_per_s']} GB/s from the cache "
        f"(aim 2).\n\n<sub>{origin(cpu)}</sub>\n\n"
        f'`FaultGuard` on a CPU, {guard["work"]}, `strategy="det"`: a step in which memory is '
        f"compared takes {guard['memory_percent']} % more, one in which everything is {guard['all_percent']} % more; with "
        f"everything at every tenth step that is {guard['all_every_10_percent']} % on average.\n\n"
        f"<sub>{origin(guard)}</sub>"
    )


def aim(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def seed() -> str:
    """The claims in the docstrings of tests/claims/test_seed_card.py, each beside its test and where that runs."""
    name = "tests/claims/test_seed_card.py"
    rows = []
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            where = "2 processes, 2 GPUs" if "multi_gpu" in marks else "CPU, GPU"
            rows.append(f"| {ast.get_docstring(node)} | {where} | `{node.name}` |")
    return (
        f"`{name}` holds the claims of [det-train](https://huggingface.co/phanerozoic/det-train)'s card, and "
        "`tests/claims/test_exported_kernel.py` its usage code, which runs as it stands on "
        "`python examples/export_kernel.py`, loaded by `kernels.get_local_kernel`:\n\n"
        "| claim | on | test |\n|---|---|---|\n" + "\n".join(rows)
    )


def coverage() -> str:
    from det_lightning.layers import convert
    from det_lightning.optim.stepping import STEPS

    modules = sorted({cls.__name__ for cls in {*convert.SWAPS, *convert.COVERED}} - {"DetLinear"})
    functions = (
        "`F.linear`, `relu`, `dropout`, the losses of `torch.nn.functional` listed in "
        "[docs/training.md](docs/training.md), `.mean()`, `.sum()`, `det_lightning.exact_mean`, `+ - * /`, casts and views"
    )
    optimizers = ", ".join(f"`{cls.__name__}`" for cls in STEPS)
    return (
        "| covered in this version | |\n|---|---|\n"
        f"| modules of `torch.nn` | {', '.join(f'`{name}`' for name in modules)} |\n"
        f"| calls in `training_step` | {functions} |\n"
        f"| optimizers, by exact type | {optimizers}, with any learning rate schedule, clipping by norm or value |\n"
        "| precision | `32-true`, `bf16-true`, `bf16-mixed` |\n"
        "| data | one `DataLoader` over a map-style data set, or over a stream that declares its length and starts "
        "anywhere; shuffled or with a sampler of its own, any length; mid-epoch resume at any split |\n"
        "| loops | `Trainer`, `LightningCLI`, `Fabric` |\n"
        "| launchers | popen, spawn, fork, torchrun |"
    )


def block(lines: list[str]) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


PAGES = {
    "README.md": {
        "failure": failure,
        "demo": demo,
        "bisect": bisect,
        "measurements": measurements,
        "seed": seed,
        "coverage": coverage,
    },
    "docs/measured.md": {
        "cpu": measured_on_cpu,
        "products": products_on_gpu,
        "streams": streams_on_gpu,
        "exchange": exchange_on_gpus,
        "training": training_steps,
        "ledger": ledger_costs,
    },
}


def rewritten(text: str, parts: dict[str, Callable[[], str]]) -> str:
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)", re.DOTALL)
        body = make()
        text, count = pattern.subn(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
        if count != 1:
            raise SystemExit(f"a page must hold <!-- generated: {name} --> once, it does {count} times")
    return text


def main() -> int:
    changed = False
    for name, parts in PAGES.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, parts)
        changed |= after != before
        if "--check" not in sys.argv:
            path.write_text(after, encoding="utf-8")
    return int(changed and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
