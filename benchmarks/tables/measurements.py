"""The table of README.md: what is aimed at, and how near it is."""

from benchmarks.tables.recorded import load

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
