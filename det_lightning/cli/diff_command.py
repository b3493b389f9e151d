"""det-lightning diff: how much of two ledgers differs."""

from __future__ import annotations

from det_lightning.bisection.difference_counts import MOST_STEPS, DifferenceCounts, KindCount, count_differences
from det_lightning.cli import exit_codes
from det_lightning.cli.ledgers import headers_json, ledger_json, open_ledger, say_header_differences, say_pair
from det_lightning.cli.printing import progress_bar, say, say_json, say_table, visible
from det_lightning.ledger.compare import header_differences


def diff(reference_path: str, candidate_path: str, *, all_steps: bool, as_json: bool) -> int:
    """Print the counts and return the exit code: DIVERGE if a recorded value or the recipe differs."""
    with open_ledger(reference_path) as reference, open_ledger(candidate_path) as candidate:
        headers = header_differences(reference, candidate)
        with progress_bar("comparing") as progress:
            most = None if all_steps else MOST_STEPS
            counts = count_differences(reference, candidate, most_steps=most, progress=progress)
        recipe_differs = any(each.part == "recipe" for each in headers)
        code = exit_codes.DIVERGE if counts.steps_differ or recipe_differs else exit_codes.MATCH
        if counts.steps == 0:
            code = exit_codes.CANNOT_JUDGE
        if as_json:
            say_json(
                {
                    "exit_code": code,
                    "reference": ledger_json(reference),
                    "candidate": ledger_json(candidate),
                    "headers": headers_json(headers),
                    "steps": counts.steps,
                    "looked_at": counts.looked_at,
                    "first": counts.first,
                    "steps_differ": counts.steps_differ,
                    "fields": counts.fields,
                    "kinds": [_kind_json(each) for each in counts.kinds],
                }
            )
            return code
        say_pair(reference, candidate)
        say_header_differences(headers, recipe_may_differ=False)
        _say_counts(counts)
    return code


def _say_counts(counts: DifferenceCounts) -> None:
    if counts.steps == 0:
        say("the ledgers have no step in common")
        return
    say(f"{counts.steps_differ} of {_steps(counts)} differ")
    if counts.looked_at < counts.steps and counts.first is not None:
        say(f"the first that differs is step {counts.first}")
    rows = [[visible(name), f"{steps} of {counts.looked_at}", ""] for name, steps in sorted(counts.fields.items())]
    rows += [
        [
            each.kind,
            f"{each.steps_differ} of {each.steps}",
            f"{len(each.tensors_differ)} of {len(each.tensors)}",
        ]
        for each in counts.kinds
    ]
    if rows:
        say_table(rows, heads=["", "steps that differ", "tensors that differ"])


def _steps(counts: DifferenceCounts) -> str:
    if counts.looked_at == counts.steps:
        return f"{counts.steps} common steps"
    return f"{counts.looked_at} steps, spread over the {counts.steps} common ones (--all reads every one),"


def _kind_json(count: KindCount) -> dict:
    return {
        "kind": count.kind,
        "steps": count.steps,
        "steps_differ": count.steps_differ,
        "tensors": len(count.tensors),
        "tensors_differ": sorted(count.tensors_differ),
    }
