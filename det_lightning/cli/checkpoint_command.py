"""det-lightning bisect where checkpoints stand in for one or both ledgers."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from det_lightning.bisection.search import DIVERGE, MATCH
from det_lightning.cli import exit_codes, printing
from det_lightning.cli.printing import cause, say, say_json, say_table, visible, warn
from det_lightning.cli.side_options import SideOptions

_CODES = {MATCH: exit_codes.MATCH, DIVERGE: exit_codes.DIVERGE}
_SHOWN = 20


def bisect_states(reference_path: str, candidate_path: str, *, as_json: bool, replay: bool, sides: SideOptions) -> int:
    """Print between which kept states the runs part, and return the exit code; with `replay` go on inside."""
    from det_lightning.replay.saved_run import SavedRun, search_states

    with SavedRun(Path(reference_path)) as reference, SavedRun(Path(candidate_path)) as candidate:
        found = search_states(reference, candidate)
        code = _CODES.get(found.verdict, exit_codes.CANNOT_JUDGE)
        if not as_json:
            say_table(
                [
                    ["reference", visible(reference.path), reference.words],
                    ["candidate", visible(candidate.path), candidate.words],
                ]
            )
            _say(found)
            if found.first is not None and not replay:
                say("with --replay the step between them is found, and the operation inside it")
        if not replay or found.first is None or not found.first.tensors:
            if replay and found.first is not None:
                warn("only settings differ, and no tensor yet, so there is no operation to find by a replay")
            if as_json:
                say_json(_json(reference, candidate, found, code))
            return code
        try:
            return _replay_between(reference, candidate, found, sides=sides, as_json=as_json)
        except Exception as error:  # what was found before it is told all the same
            if as_json and not printing.json_told:
                inside = {"verdict": "cannot be judged", "reason": cause(error)}
                say_json(_json(reference, candidate, found, exit_codes.CANNOT_JUDGE) | {"inside": inside})
            raise


def _replay_between(reference: Any, candidate: Any, found: Any, *, sides: SideOptions, as_json: bool) -> int:
    """Record both runs anew between the last equal and the first unlike state, and bisect those ledgers."""
    from det_lightning.cli import bisect_command
    from det_lightning.replay.between import ledger_between

    with tempfile.TemporaryDirectory(prefix="det-lightning-between-") as scratch:
        ledgers, checkpoints = [], []
        for name, run, entry in zip(("reference", "candidate"), (reference, candidate), sides.entry, strict=True):
            ledger, checkpoint = ledger_between(
                run, found.last_match, found.first.step, entry=entry, scratch=Path(scratch, name)
            )
            ledgers.append(ledger)
            checkpoints.append(checkpoint)
        if not as_json:
            say("replayed on both sides, with a ledger:")
        return bisect_command.bisect(
            *map(str, ledgers),
            recipe_may_differ=True,
            as_json=as_json,
            replay=True,
            sides=sides.starting_from(tuple(checkpoints)),
        )


def _say(found: Any) -> None:
    say(f"{found.verdict.value if found.verdict in _CODES else 'cannot be judged'}: {found.reason}")
    if found.first is None:
        return
    tensors, settings = found.first.tensors, found.first.settings
    if settings:
        say("settings of optimizer and schedule differ:")
        say_table([[visible(name), visible(one or "-", widest=40), visible(other or "-", widest=40)]
                   for name, one, other in settings[:_SHOWN]])  # fmt: skip
    if tensors:
        say(f"{len(tensors)} tensor{'s differ' if len(tensors) > 1 else ' differs'} after step {found.first.step}:")
        say_table([[visible(name), one or "-", other or "-"] for name, one, other in tensors[:_SHOWN]])
    for kind in (tensors, settings):
        if len(kind) > _SHOWN:
            say(f"  ... and {len(kind) - _SHOWN} more (--json lists all)")


def _json(reference: Any, candidate: Any, found: Any, code: int) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "exit_code": code,
        "reason": found.reason,
        "reference": str(reference.path),
        "candidate": str(candidate.path),
        "steps": found.steps,
        "last_match": found.last_match,
        "first": None if found.first is None else asdict(found.first),
    }
