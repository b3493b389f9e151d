"""det-lightning verify and replay: is a ledger what its writer wrote, and does running the steps again give
the same?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import typer

from det_lightning.cli import exit_codes
from det_lightning.cli.difference_text import difference_json, say_difference
from det_lightning.cli.ledgers import open_ledger
from det_lightning.cli.printing import progress_bar, say, say_json, visible, warn
from det_lightning.ledger.chain import ChainReport, verify_chain
from det_lightning.ledger.kept_checkpoints import replay_ranges
from det_lightning.ledger.reader import LedgerReader


def verify(
    path: str,
    *,
    chain_only: bool,
    steps: int | None,
    world: int,
    accumulate: int | None,
    entry: str | None,
    as_json: bool,
) -> int:
    """Check the chain, then, unless `chain_only`, replay the whole run or `steps` single steps spread over
    it.
    """
    with progress_bar("checking the chain") as progress:
        report = verify_chain(path, progress=progress)
    answer = {"path": path, "chain": asdict(report) | {"sound": report.sound}, "replay": None}
    if not as_json:
        _say_chain(path, report)
    code = exit_codes.MATCH if report.sound else exit_codes.DIVERGE
    if report.sound and not chain_only:
        ranges, what = [(None, None)], f"steps {report.first_step} to {report.last_step}"
        if steps is not None:
            chosen = spread(report.first_step, report.last_step, steps)
            with open_ledger(path) as reader:
                ranges = replay_ranges(reader, chosen)
            what = f"step{'s' if len(chosen) > 1 else ''} {', '.join(map(str, chosen))}"
        code, answer["replay"] = _replay(path, ranges, what, world, accumulate, entry, None, as_json)
    if as_json:
        say_json(answer | {"exit_code": code})
    return code


def replay_steps(
    path: str,
    *,
    start: int | None,
    stop: int | None,
    world: int,
    accumulate: int | None,
    entry: str | None,
    out: str | None,
) -> int:
    """Run the steps after `start` up to `stop` again and compare each record."""
    with open_ledger(path) as reader:
        first, last = reader.first_step, reader.last_step
        for name, step in (("--from", start), ("--to", stop)):
            if step is not None and not (reader.first_step or 0) <= step <= (reader.last_step or 0):
                raise typer.BadParameter(
                    f"{name} {step} is not a step of {visible(path)}; "
                    f"it holds the steps {reader.first_step} to {reader.last_step}"
                )
    if start is not None and stop is not None and start >= stop:
        raise typer.BadParameter(f"--from {start} must be below --to {stop}")
    what = f"steps {first if start is None else start} to {last if stop is None else stop}"
    return _replay(path, [(start, stop)], what, world, accumulate, entry, out, False)[0]


def spread(first: int | None, last: int | None, count: int) -> list[int]:
    """`count` steps spread evenly over first + 1 .. last, the last one included."""
    total = 0 if first is None or last is None else last - first
    count = min(count, total)
    return [first + (total * (i + 1)) // count for i in range(count)]


def _replay(path, ranges, what, world, accumulate, entry, out, as_json) -> tuple[int, dict]:
    """Exit code and what to tell as JSON. what: the steps that are compared, in words."""
    from det_lightning.replay import replay

    done = 0
    for start, stop in ranges:
        with progress_bar("replaying") as bar:
            result = replay(
                path,
                start=start,
                stop=stop,
                world=world,
                accumulate=accumulate,
                entry=entry,
                out=out,
                progress=_each_step(bar, path, stop),
            )
        done += result.steps
        if not result.matched:
            first = result.first
            if not as_json:
                say(f"diverge: the replay of {visible(path)} diverges{f' at step {first.step}' if first else ''}")
                if first:
                    say_difference(first)
            told = {"matched": False, "steps": done, "first": difference_json(first) if first else None}
            return exit_codes.DIVERGE, told
    if done == 0:
        if not as_json:
            say(f"cannot be judged: {visible(path)} has no step to replay")
        return exit_codes.CANNOT_JUDGE, {"matched": None, "steps": 0, "first": None}
    if not as_json:
        say(f"match: {what} agree, replayed with world size {world} ({done} step{'s' if done > 1 else ''} run)")
    return exit_codes.MATCH, {"matched": True, "steps": done, "first": None}


def _each_step(bar: Callable[[int, int], None] | None, path: str, stop: int | None) -> Callable[[int], None] | None:
    """What to call with each finished step, None if nobody watches."""
    if bar is None:
        return None
    with LedgerReader(path) as reader:
        last = reader.last_step if stop is None else stop
    return lambda step: bar(step, last)


def _say_chain(path: str, report: ChainReport) -> None:
    shown = visible(path)
    if report.damage is not None:
        at = f" (step {report.damage.step})" if report.damage.step is not None else ""
        say(f"damaged: {shown}: line {report.damage.line}{at} is the first bad one: {visible(report.damage.what)}")
        if report.records:
            before = "record before it is" if report.records == 1 else f"{report.records} records before it are"
            say(f"  the {before} sound, up to step {report.last_step}")
        return
    records = "no records"
    if report.records:
        records = f"{report.records} records, steps {report.first_step} to {report.last_step}"
    behind = f", {report.superseded} behind a resume" if report.superseded else ""
    say(f"sound: {shown}: {report.lines} lines, {records}{behind}, {'closed' if report.closed else 'not closed'}")
    if report.without_leaves:
        say(f"  the leaves of {report.without_leaves} records were dropped on purpose; of these the roots were read")
    if report.torn:
        leaves = sum(report.torn_leaf_bytes.values())
        after = f"after step {report.last_step}" if report.records else "before the first record"
        warn(
            f"{shown} has a torn end: {report.torn_bytes} bytes of a line and {leaves} bytes of leaves "
            f"{after} belong "
            "to a record that was never finished; that record is lost, and a resume cuts the bytes off"
        )
