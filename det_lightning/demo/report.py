"""The table and the picture of the demonstration."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from det_lightning.demo.network import GLOBAL_BATCH, STEPS
from det_lightning.demo.runs import RunResult

_TITLES = {
    "ddp": "ddp (float32 sums)",
    "det": "det (exact sums)",
    "impostor": "det on float64 sums",
}


def print_table(results: list[RunResult], out: Console) -> None:
    """One row a run; every strategy is compared with its own first run."""
    table = Table(title=f"{STEPS} steps, {GLOBAL_BATCH} images a step, split in different ways", title_justify="left")
    for name in ("strategy", "processes", "micro-\nbatches", "first step\nthat differs", "largest loss\ndifference",
                 "weights that\ndiffer", "SHA-256 of\nthe weights"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("strategy",) else "right")
    first_of: dict[str, RunResult] = {}
    for result in results:
        first = first_of.setdefault(result.plan.strategy, result)
        table.add_row(
            _TITLES[result.plan.strategy],
            str(result.plan.world_size),
            str(result.plan.accumulate),
            *(_reference(results) if result is first else _differences(first, result)),
            f"{result.digest[:12]}...",
            end_section=result is [each for each in results if each.plan.strategy == result.plan.strategy][-1],
        )
    Console(file=out.file, width=max(out.width, 120), highlight=False).print(table)


def print_verdicts(results: list[RunResult], out: Console) -> None:
    """One line a strategy: how many of the other splits end in other weights."""
    for strategy in dict.fromkeys(result.plan.strategy for result in results):
        first, *others = [result for result in results if result.plan.strategy == strategy]
        different = sum(other.digest != first.digest for other in others)
        if others:
            out.print(f"{_TITLES[strategy]}: {different} of {len(others)} other splits end in other weights")


def _reference(results: list[RunResult]) -> tuple[str, str, str]:
    return ("(reference)" if len(results) > 1 else "-", "", "")


def _differences(first: RunResult, other: RunResult) -> tuple[str, str, str]:
    places = [step for step in range(STEPS) if first.step_digests[step] != other.step_digests[step]]
    loss = float(np.max(np.abs(first.losses - other.losses)))
    ours, theirs = (np.frombuffer(result.weights, dtype="<u4") for result in (first, other))
    different = int(np.count_nonzero(ours != theirs))
    return (
        str(places[0] + 1) if places else "never",
        f"{loss:.1e}" if loss else "0",
        f"{different:,} of {len(ours):,}",
    )


def draw_picture(results: list[RunResult], path: Path) -> Path:
    """Loss curves on the left; on the right how far each run is from the first one of its strategy, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, distances) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    steps = np.arange(1, STEPS + 1)
    colours = {"ddp": "#c44e52", "det": "#1f4e9c"}
    firsts = {result.plan.strategy: result for result in reversed(results)}
    for strategy, first in firsts.items():
        style = {"color": colours[strategy], "linewidth": 3 if strategy == "ddp" else 1.2}
        curves.plot(steps, first.losses, label=strategy, alpha=0.5 if strategy == "ddp" else 1.0, **style)
    curves.set(xlabel="step", ylabel="loss", title="The same training under both strategies", yscale="log")
    curves.legend(frameon=False)
    for strategy in firsts:
        others = [each for each in results if each.plan.strategy == strategy and each is not firsts[strategy]]
        for place, other in enumerate(others):
            distance = np.abs(other.losses - firsts[strategy].losses)
            label = f"{strategy}, {len(others)} other splits" if place == 0 else None
            style = {"linewidth": 0.8, "alpha": 0.7} if strategy == "ddp" else {"linewidth": 3}
            distances.plot(steps, distance, color=colours[strategy], label=label, **style)
    distances.set_yscale("symlog", linthresh=1e-9, linscale=0.6)
    distances.set(xlabel="step", ylabel="|loss - loss of 1 process|", title="1, 2, 4 processes, 1 or 2 micro-batches")
    distances.set_ylim(-3e-10, 3e-6)
    distances.legend(frameon=False, loc="upper center", ncols=2)
    for axes in (curves, distances):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return path
