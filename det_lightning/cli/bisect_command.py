"""det-lightning bisect: the first step at which a run is another run than its reference."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from det_lightning.bisection.ledgers import Comparison, compare_ledgers
from det_lightning.bisection.search import DIVERGE, MATCH
from det_lightning.cli import exit_codes
from det_lightning.cli.difference_text import difference_json, say_difference
from det_lightning.cli.flip_report import FlipReport, report_flip, say_flip
from det_lightning.cli.ledgers import headers_json, ledger_json, open_ledger, say_header_differences, say_pair
from det_lightning.cli.printing import cause, progress_bar, say, say_json, visible
from det_lightning.cli.side_options import SideOptions
from det_lightning.cli.step_report import finding_json, say_finding
from det_lightning.errors import DetError
from det_lightning.ledger.reader import LedgerReader

_CODES = {MATCH: exit_codes.MATCH, DIVERGE: exit_codes.DIVERGE}


def bisect(
    reference_path: str,
    candidate_path: str,
    *,
    recipe_may_differ: bool,
    as_json: bool,
    replay: bool,
    sides: SideOptions,
    html: str | None = None,
    png: str | None = None,
) -> int:
    """Print what differs first, and return the exit code."""
    with open_ledger(reference_path) as reference, open_ledger(candidate_path) as candidate:
        with progress_bar("comparing") as progress:
            found = compare_ledgers(reference, candidate, recipe_may_differ=recipe_may_differ, progress=progress)
        code = _CODES.get(found.verdict, exit_codes.CANNOT_JUDGE)
        if not as_json:
            _say(reference, candidate, found, recipe_may_differ)
        inside = flip = failure = None
        if replay and found.first is not None and found.first.step > 0:
            try:
                inside = sides.search(reference, candidate, found.first.step)
            except Exception as error:  # of the runs' own code too: what was found before it is told all the same
                failure, inside = error, StepFailure(cause(error))
            if inside.verdict == "cannot be judged":
                code = exit_codes.CANNOT_JUDGE
            if not as_json and failure is None:
                say_finding(inside)
            if inside.verdict != "found" and code == exit_codes.DIVERGE:
                flip = report_flip(reference, found.first, entry=sides.entry[0])
                if not as_json:
                    say_flip(flip)
        elif replay and found.first is not None and not as_json:
            say("replay: the runs differ before their first step, so there is no operation to look for")
        if as_json:
            say_json(_json(reference, candidate, found, code, inside, flip))
        _write_reports(reference, candidate, found, inside, html, png)
    if failure is not None:
        raise failure
    return code


@dataclass(frozen=True)
class StepFailure:
    """In the place of a replay.step_search.StepFinding where a replay ended with an error. reason: what it said."""

    reason: str
    verdict: str = "cannot be judged"
    rank = difference = element = sample = None
    tensor = ""
    before = ()


def _write_reports(reference, candidate, found: Comparison, inside, html: str | None, png: str | None) -> None:
    if html is None and png is None:
        return
    from det_lightning.cli.report_data import gather
    from det_lightning.cli.report_html import html_report

    report = gather(reference, candidate, found, inside)
    try:
        if html is not None:
            Path(html).write_text(html_report(report), encoding="utf-8", errors="backslashreplace")
        if png is not None:
            from det_lightning.cli.report_png import write_png

            write_png(report, Path(png))
    except OSError as error:
        paths = " or ".join(path for path in (html, png) if path is not None)
        raise DetError(f"the report {paths} cannot be written: {error.strerror}") from None
    written = " and ".join(visible(path) for path in (html, png) if path is not None)
    print(f"report: {written}", file=sys.stderr)


def _say(reference: LedgerReader, candidate: LedgerReader, found: Comparison, recipe_may_differ: bool) -> None:
    say_pair(reference, candidate)
    say_header_differences(found.headers, recipe_may_differ=recipe_may_differ)
    if found.first is None:
        say(f"{'match' if found.verdict is MATCH else 'cannot be judged'}: {found.reason}")
        if found.verdict is not MATCH and not recipe_may_differ and any(e.part == "recipe" for e in found.headers):
            say("with --recipe-may-differ they are compared nevertheless")
        _say_length(reference, candidate, found)
        return
    before = ""
    if found.first.last_match is not None:
        before = f"; steps {found.first_common} to {found.first.last_match} agree"
    say(f"diverge: {found.reason}{before}")
    say_difference(found.first)


def _say_length(reference: LedgerReader, candidate: LedgerReader, found: Comparison) -> None:
    if found.verdict is MATCH and reference.last_step != candidate.last_step:
        longer = max(reference, candidate, key=lambda reader: reader.last_step)
        name = "reference" if longer is reference else "candidate"
        say(f"the {name} goes on to step {longer.last_step}, where there is nothing to compare it with")


def _json(reference, candidate, found: Comparison, code: int, inside, flip: FlipReport | None) -> dict:
    return {
        "verdict": found.verdict.value,
        "exit_code": code,
        "reason": found.reason,
        "reference": ledger_json(reference),
        "candidate": ledger_json(candidate),
        "headers": headers_json(found.headers),
        "first_common": found.first_common,
        "last_common": found.last_common,
        "first": None if found.first is None else difference_json(found.first),
        "inside": None if inside is None else finding_json(inside),
        "flip": None if flip is None else asdict(flip),
    }
