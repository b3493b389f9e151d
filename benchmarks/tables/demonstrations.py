"""The demonstration of README.md: what it printed and drew."""

from benchmarks.tables.recorded import block, load, origin


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
