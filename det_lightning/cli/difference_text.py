"""How a difference between two records is told."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from det_lightning.cli.printing import field_text, plain_value, say, say_table, visible
from det_lightning.ledger.compare import Difference
from det_lightning.ledger.explanation import explanation
from det_lightning.ledger.record import KINDS

_TENSORS_SHOWN = 20
_ROOT_DIGITS = 16


def say_difference(difference: Difference) -> None:
    """What differs, what agrees, which tensors, and what that means."""
    rows = [
        [
            "differs",
            visible(each.name),
            *(_field(each.name, side) for side in (each.reference, each.candidate)),
        ]
        for each in difference.fields
    ]
    rows += [
        [
            "differs",
            f"root of {visible(each.name)}",
            *(side.strip('"')[:_ROOT_DIGITS] if side else "-" for side in (each.reference, each.candidate)),
        ]
        for each in difference.roots
    ]
    say_table(rows)
    kinds = [name for name in difference.agreeing if name in KINDS]
    fields = [name for name in difference.agreeing if name not in (*KINDS, "step")]
    if fields or kinds:
        say(f"  agree: {', '.join(map(visible, fields + kinds))}")
    _say_tensors(difference)
    meaning = explanation(difference)
    if meaning:
        say(meaning)


def difference_json(difference: Difference) -> dict[str, Any]:
    """The difference as plain JSON values, with its meaning in words."""
    told = asdict(difference) | {"explanation": explanation(difference)}
    for each in (*told["fields"], *told["roots"]):
        each |= {side: plain_value(each[side]) for side in ("reference", "candidate")}
    return told


def _field(name: str, value: str | None) -> str:
    return field_text(name, plain_value(value))


def _say_tensors(difference: Difference) -> None:
    for kind in KINDS:
        tensors = [each for each in difference.tensors if each.kind == kind]
        if tensors:
            say(f"{len(tensors)} tensor{'s differ' if len(tensors) > 1 else ' differs'} in {kind}:")
            shown = tensors[:_TENSORS_SHOWN]
            say_table([[visible(e.name), e.reference or "-", e.candidate or "-"] for e in shown])
            if len(tensors) > len(shown):
                say(f"  ... and {len(tensors) - len(shown)} more (--json lists all)")
    if difference.kinds_without_leaves:
        kinds = ", ".join(map(visible, difference.kinds_without_leaves))
        say(
            f"leaves of step {difference.step} were not kept for {kinds}; roots were: they show that a tensor differs, and "
            f"bisect --replay finds where"
        )
