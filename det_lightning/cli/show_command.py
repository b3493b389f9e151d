"""det-lightning show: what a ledger holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from det_lightning.cli import exit_codes
from det_lightning.cli.ledgers import ledger_json, open_ledger, steps_text
from det_lightning.cli.printing import decimal, field_text, header_name, header_text, say, say_json, say_table, visible
from det_lightning.ledger.compare import HEADER_PARTS, flat_header
from det_lightning.ledger.reader import LedgerReader, Resume
from det_lightning.ledger.record import KINDS, Record

_ENDS_SHOWN = 10
_ROOT_DIGITS = 12


def show(path: str, *, step: int | None, tensors: bool, as_json: bool) -> int:
    """Print header and records, or the one record of `step`, with the digest of each tensor if asked."""
    with open_ledger(path) as reader:
        if tensors and step is None:
            step = reader.last_step
        if as_json:
            _show_json(reader, step, tensors)
        elif step is not None:
            _show_step(reader, reader.record(step), tensors)
        else:
            _show_run(reader)
    return exit_codes.MATCH


def _show_run(reader: LedgerReader) -> None:
    count = f"{reader.count} records, " if reader.count else ""
    say(f"{visible(reader.path)}: {count}{steps_text(reader)}")
    if reader.resumed_from is not None:
        say(f"continues another ledger after its step {reader.resumed_from['step']}")
    for part in HEADER_PARTS:
        if reader.header[part]:
            say(part)
            say_table(
                [[header_name(n), header_text(n, v)] for n, v in sorted(flat_header(reader.header[part]).items())]
            )
    if reader.resumes:
        say("resumed")
        say_table([[f"after step {each.step}", _resume_text(reader, each)] for each in reader.resumes])
    checkpoints = reader.checkpoints()
    if checkpoints:
        say("checkpoints")
        say_table([[f"step {each.step}", visible(each.path)] for each in checkpoints])
    if reader.count == 0:
        return
    shown = list(_shown_records(reader))
    kinds = [kind for kind in KINDS if any(record.agree["roots"].get(kind) for record in shown)]
    rows = []
    for record in shown:
        if rows and record.step != int(rows[-1][0]) + 1:
            rows.append([f"... {record.step - int(rows[-1][0]) - 1} more", *[""] * (2 + len(kinds))])
        loss = record.agree.get("loss")
        rows.append(
            [
                str(record.step),
                field_text("epoch", record.agree.get("epoch")),
                decimal(loss) if isinstance(loss, str) else "-",
                *((record.agree["roots"].get(kind) or "-")[:_ROOT_DIGITS] for kind in kinds),
            ]
        )
    say_table(rows, heads=["step", "epoch", "loss", *kinds])


def _resume_text(reader: LedgerReader, resume: Resume) -> str:
    """What was cut off, and the environment as far as it differs from that of the first start."""
    first, then = flat_header(reader.environment), flat_header(resume.environment)
    notes = [
        f"{header_name(name)} {header_text(name, first.get(name))} -> {header_text(name, then.get(name))}"
        for name in sorted(first.keys() | then.keys())
        if first.get(name) != then.get(name)
    ]
    if resume.torn_bytes:
        notes.insert(0, f"{resume.torn_bytes} torn bytes cut off")
    return ", ".join(notes) or "in the same environment"


def _shown_records(reader: LedgerReader) -> Iterator[Record]:
    """All records, or the first and the last few of a long run."""
    for step in range(reader.first_step, reader.last_step + 1):
        if min(step - reader.first_step, reader.last_step - step) < _ENDS_SHOWN:
            yield reader.record(step)


def _show_step(reader: LedgerReader, record: Record, tensors: bool) -> None:
    say(f"{visible(reader.path)}: record of step {record.step}")
    say_table(
        [
            *(
                [visible(name), field_text(name, value)]
                for name, value in sorted(record.agree.items())
                if name != "roots"
            ),
            *([f"root of {visible(kind)}", root or "-"] for kind, root in sorted(record.agree["roots"].items())),
            *([f"fact {visible(name)}", field_text("", value)] for name, value in sorted(record.facts.items())),
            ["trace", record.trace],
        ]
    )
    for kind in record.leaves if tensors else ():
        if not reader.keeps_leaves(record, kind):
            say(f"{kind}: leaves of step {record.step} were not kept; roots were")
            continue
        say(kind)
        say_table([[visible(name), digest] for name, digest in reader.leaves(record, kind).items()])


def _show_json(reader: LedgerReader, step: int | None, tensors: bool) -> None:
    records = reader.records() if step is None else [reader.record(step)]
    say_json(
        ledger_json(reader)
        | {part: reader.header[part] for part in HEADER_PARTS}
        | {
            "resumed_from": reader.resumed_from,
            "checkpoints": [asdict(each) for each in reader.checkpoints()],
            "steps": [_record_json(reader, record, tensors) for record in records],
        }
    )


def _record_json(reader: LedgerReader, record: Record, tensors: bool) -> dict:
    body = {"step": record.step, "agree": record.agree, "facts": record.facts, "trace": record.trace}
    if tensors:
        body["tensors"] = {
            kind: reader.leaves(record, kind) for kind in record.leaves if reader.keeps_leaves(record, kind)
        }
    return body
