"""Opens the ledgers that a command names, and the lines about them that several commands print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from det_lightning.cli.printing import header_name, header_text, plain_value, say, say_table, visible, warn
from det_lightning.ledger.compare import HEADER_PARTS, HeaderDifference
from det_lightning.ledger.lines import LEDGER_FILE
from det_lightning.ledger.reader import LedgerReader

CHECKPOINT_SUFFIXES = (".ckpt",)


def ledger_directory(path: str) -> str:
    """`path`, if a ledger was started there. Raises typer.BadParameter, which is misuse, if not."""
    shown = visible(path)
    try:
        if not Path(path).exists():
            raise typer.BadParameter(f"{shown} does not exist")
        if not Path(path).is_dir():
            raise typer.BadParameter(f"{shown} is a file; give the directory that holds {LEDGER_FILE}")
        if not (Path(path) / LEDGER_FILE).exists():
            raise typer.BadParameter(f"{shown} is not a ledger: it holds no {LEDGER_FILE}")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{shown} cannot be looked at: {error}") from None
    return path


def is_ledger(path: str) -> bool:
    return (Path(path) / LEDGER_FILE).exists()


def run_path(path: str) -> str:
    """`path`, if a ledger or a checkpoint lies there. Raises typer.BadParameter, which is misuse, if not."""
    try:
        if Path(path).is_file() and Path(path).suffix in CHECKPOINT_SUFFIXES:
            return path
        if Path(path).is_dir() and not is_ledger(path):
            if any(each.suffix in CHECKPOINT_SUFFIXES for each in Path(path).rglob("*")):
                return path
            raise typer.BadParameter(
                f"{visible(path)} is not a ledger: it holds no {LEDGER_FILE}, and no {', '.join(CHECKPOINT_SUFFIXES)} either"
            )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{visible(path)} cannot be looked at: {error}") from None
    return ledger_directory(path)


def writable_file(path: str | None) -> str | None:
    """`path`, if a file can be written there. Raises typer.BadParameter, which is misuse, if not."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise typer.BadParameter(f"{visible(path)} is not a file in a directory that exists")
    return path


def existing_file(path: str) -> str:
    """`path`, if it is a file. Raises typer.BadParameter, which is misuse, if not."""
    if not Path(path).is_file():
        raise typer.BadParameter(f"{visible(path)} is not a file")
    return path


def open_ledger(path: str) -> LedgerReader:
    """The reader; a torn end is told on stderr."""
    reader = LedgerReader(path)
    if reader.torn_bytes:
        up_to = f" up to step {reader.last_step}" if reader.count else ""
        warn(
            f"{visible(path)}: the last line is torn ({reader.torn_bytes} bytes, a record that was being "
            "written); "
            f"judged on the whole records{up_to}"
        )
    return reader


def steps_text(reader: LedgerReader) -> str:
    if reader.first_step is None:
        return "no records"
    text = f"steps {reader.first_step} to {reader.last_step}, {'closed' if reader.closed else 'not closed'}"
    times = len(reader.resumes)
    resumed = {0: "", 1: ", resumed once"}.get(times, f", resumed {times} times")
    return text + resumed


def say_pair(reference: LedgerReader, candidate: LedgerReader) -> None:
    say_table(
        [
            ["reference", visible(reference.path), steps_text(reference)],
            ["candidate", visible(candidate.path), steps_text(candidate)],
        ]
    )


def say_header_differences(differences: Sequence[HeaderDifference], *, recipe_may_differ: bool) -> None:
    for part in HEADER_PARTS:
        found = [each for each in differences if each.part == part]
        if found:
            allowed = part != "recipe" or recipe_may_differ
            say(f"{part} differs{' (allowed)' if allowed else ''}:")
            say_table(
                [
                    [
                        header_name(each.name),
                        header_text(each.name, each.reference),
                        header_text(each.name, each.candidate),
                    ]
                    for each in found
                ]
            )


def headers_json(differences: Sequence[HeaderDifference]) -> list[dict[str, Any]]:
    return [
        asdict(each) | {"reference": plain_value(each.reference), "candidate": plain_value(each.candidate)}
        for each in differences
    ]


def ledger_json(reader: LedgerReader) -> dict[str, Any]:
    return {
        "path": str(reader.path),
        "first_step": reader.first_step,
        "last_step": reader.last_step,
        "records": reader.count,
        "closed": reader.closed,
        "resumes": [asdict(each) for each in reader.resumes],
        "torn_bytes": reader.torn_bytes,
    }
