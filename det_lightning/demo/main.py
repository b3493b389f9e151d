"""What `det-lightning demo` does: which configurations run, and what is said about them.

Its first line of output is the digest expected on every machine, its last the digest reached.
"""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from det_lightning.demo import report
from det_lightning.demo.impostor import wrong_first_weights
from det_lightning.demo.network import GLOBAL_BATCH
from det_lightning.demo.planted_fault import find_planted_fault
from det_lightning.demo.runs import RunPlan, RunResult, train
from det_lightning.errors import InputError
from det_lightning.replay.group import Group, worker_group

EXPECTED_DIGEST = "6b74394665ebea23c0b3d254a614ac3aaa7f91fc828e2692a221feaaad1de8ab"
DEFAULT_PICTURE = "det-lightning-demo.png"
_INTRODUCTION = """
A small network learns 1,797 handwritten digits. Each row is the same training: same first weights, same images in
every step, same learning rate. Only the split changes: how many processes share a step, and in how many micro-batches
each works through its part. Nothing in the mathematics depends on the split.
"""
_SPLITS = [(world_size, accumulate) for world_size in (1, 2, 4) for accumulate in (1, 2)]
_ARRANGEMENT = 7
_MOST_RANKS = 16


def main(
    *,
    world: int | None = None,
    micro: int | None = None,
    threads: int | None = None,
    order: str = "natural",
    impostor: str | None = None,
    flip: str | None = None,
    export: str | Path | None = None,
    picture: str | Path | None = None,
) -> int:
    """Runs the demonstration and prints it.

    Args:
        world, micro, threads: the reader's own split: processes, most samples of a micro-batch, threads of each.
        order: "natural", or "shuffled": samples of a step dealt to processes and micro-batches in another order.
        impostor: "float64" puts float64 sums under the same code; seen to fail.
        flip: "secret" flips one bit of one weight at a place drawn in a worker, and finds it from the ledgers.
        export: file for the final weights; their SHA-256 is the digest.
        picture: file for the picture of the full demonstration, by default det-lightning-demo.png.

    Returns:
        0 if the digest reached is the one expected (and a planted fault was found), else 1.

    Raises:
        InputError: an argument out of range.
    """
    _check(world, micro, threads, order, impostor, flip)
    out, progress = Console(highlight=False, soft_wrap=True), Console(stderr=True)
    own_split = any(value is not None for value in (world, micro, threads)) or order != "natural"
    plans = _plans(world or 1, micro, threads or 1, order) if own_split else _full_plans()
    if impostor is not None:
        plans = [RunPlan("impostor", plan.world_size, plan.accumulate) for plan in plans if plan.strategy == "det"]
    out.print(f"expected {EXPECTED_DIGEST}")
    size = max(plan.world_size for plan in plans)
    found = True
    with tempfile.TemporaryDirectory(prefix="det-lightning-demo-") as scratch, worker_group(size) as group:
        if flip is not None:
            result, found = find_planted_fault(group, Path(scratch), out)
            results = [result]
        else:
            out.print(_INTRODUCTION)
            results = _run_all(group, plans, progress)
            report.print_table(results, out)
            report.print_verdicts(results, out)
        if impostor is not None:
            wrong, weights = wrong_first_weights()
            out.print(
                f"float64 sums may agree with themselves, but not with the exact sum: {wrong} of {weights} first weights "
                f"are wrong before the first step"
            )
    if not own_split and impostor is None and flip is None:
        saved = report.draw_picture(results, Path(picture or DEFAULT_PICTURE))
        out.print(f"picture  {saved}")
    reached = _reached(results)
    if export is not None:
        Path(export).write_bytes(reached.weights)
        out.print(f"weights  {export}")
    out.print(f"reached  {reached.digest}")
    return 0 if found and reached.digest == EXPECTED_DIGEST else 1


def _full_plans() -> list[RunPlan]:
    return [RunPlan(strategy, *split) for strategy in ("ddp", "det") for split in _SPLITS]


def _plans(world: int, micro: int | None, threads: int, order: str) -> list[RunPlan]:
    accumulate = 1 if micro is None else -(-GLOBAL_BATCH // (world * micro))
    return [RunPlan("det", world, accumulate, threads, _ARRANGEMENT if order == "shuffled" else None)]


def _run_all(group: Group, plans: list[RunPlan], console: Console) -> list[RunResult]:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=len(plans))
        results = []
        for plan in plans:
            progress.update(task, description=plan.name)
            results.append(group.run(train, plan.world_size, plan))
            progress.advance(task)
    return results


def _reached(results: list[RunResult]) -> RunResult:
    """The run whose digest is shown: one that differs from what is expected, if there is any."""
    exact = [result for result in results if result.plan.strategy != "ddp"]
    return next((result for result in exact if result.digest != EXPECTED_DIGEST), exact[0])


def _check(world, micro, threads, order, impostor, flip) -> None:
    for name, value, most in (("world", world, _MOST_RANKS), ("micro", micro, GLOBAL_BATCH), ("threads", threads, 256)):
        if value is not None and not 1 <= value <= most:
            raise InputError(f"--{name} is from 1 to {most}, got {value}")
    for name, value, allowed in (
        ("order", order, ("natural", "shuffled")),
        ("impostor", impostor, (None, "float64")),
        ("flip", flip, (None, "secret")),
    ):
        if value not in allowed:
            raise InputError(f"--{name} is {' or '.join(str(each) for each in allowed if each)}, got {value!r}")
    if flip is not None and impostor is not None:
        raise InputError("--flip and --impostor are two demonstrations; give one of them")
