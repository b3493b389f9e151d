"""Writes the generated parts of README.md from benchmarks/results/ and from the code's own tables.

`python benchmarks/readme_tables.py` rewrites them; with `--check` it only says whether they are up to date (exit code 1).
"""

import ast
import json
import re
import sys
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


def measurements() -> str:
    parts = []
    cpu = load("cpu-arithmetic.json")
    rows = [
        f"| {row['work']} | {row['ratio']:.1f} | {row['target']} | {row['against']} |"
        for row in cpu["rows"]
        if row["target"] is not None
    ]
    repdl = load("against-repdl.json")
    theirs, ours = repdl["rows"][0], repdl["rows"][1]
    parts.append(
        "Exact arithmetic on two cores of a CPU, time as a multiple of the stock operation in the same process (medians of "
        "seven), beside what is aimed at. [docs/cpu.md](docs/cpu.md) says how it works.\n\n"
        "| work | ratio | aim | against |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(cpu)}</sub>\n\n"
        + f"Beside RepDL's reproducible CPU product, {theirs['work'].removeprefix('repdl ')}: `det_gemm` is "
        f"{ours['repdl_over_this']:.0f} times as fast, with a largest error of {ours['largest_error']:.1e} instead of "
        f"{theirs['largest_error']:.1e} (relative to the exact value or to 1).\n\n<sub>{origin(repdl)}</sub>"
    )
    result = load("kernels-h200.json")
    rows = [
        f"| {row['data']} {row['product']}, {row['output']} out | {row['ratio']:.2f} | {row['ratio_to_bfloat16']:.1f} "
        f"| {row['tops']:.0f} |"
        for row in result["products"]
    ]
    parts.append(
        "Exact products on one GPU, time as a multiple of cuBLAS float32 (TF32 off) in the same process, small products as "
        f"replays of a CUDA graph; {result['tests']['passed']} tests compare bytes with the CPU, "
        f"{len(result['tests']['not_passed'])} failed. [docs/cuda.md](docs/cuda.md) says what bounds each line.\n\n"
        "| product | of cuBLAS float32 | of cuBLAS bfloat16 | int8 TOPS inside |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "".join(
            f"\n\n{row['work']}: {100 * row['share_of_copy']:.0f} % of a device copy's bandwidth."
            for row in result["streams"]
            if row["work"].startswith("digest")
        )
        + f"\n\n<sub>{origin(result)}</sub>"
    )
    result = load("streams-h200.json")
    rows = [f"| {row['work']} | {100 * row['share_of_copy']:.0f} % | {aim(row['aim'])} |" for row in result["rows"]]
    parts.append(
        "Operations that memory bounds on the same GPU, bytes read and written over time, as a share of what a copy of 1 GiB"
        " reaches in the same process; 2^28 float32 numbers unless said:\n\n| operation | of a copy | aim |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )
    return "\n\n".join(parts)


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


PARTS = {
    "failure": failure,
    "demo": demo,
    "bisect": bisect,
    "measurements": measurements,
    "seed": seed,
    "coverage": coverage,
}


def main() -> int:
    path = ROOT / "README.md"
    before = text = path.read_text()
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)", re.DOTALL)
        body = make()
        text = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    if "--check" in sys.argv:
        return int(text != before)
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
