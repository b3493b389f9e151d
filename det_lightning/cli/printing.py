"""Text for people: tables, bits with their decimal value, progress.

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from det_lightning.errors import DetError, LedgerError
from det_lightning.ledger.record import bits_float

FLOAT_FIELDS = ("loss", "learning_rates", "clip")
FLOAT_PARTS, FLOAT_ENTRY = ("optimizers", "schedulers", "clip", "trainer"), ".float64"
_BITS = re.compile(r"[0-9a-f]{16}")
_WIDEST_VALUE = 60


def say(text: str = "") -> None:
    """One line of the answer."""
    print(text)


def warn(text: str) -> None:
    """One line that is not part of the answer."""
    print(f"warning: {text}", file=sys.stderr)


json_told = False
"""Whether this command has answered as JSON already, so that an error after it does not add a second answer."""


def say_json(value: Any) -> None:
    global json_told
    json_told = True
    print(json.dumps(value, indent=2, ensure_ascii=False, default=list))


def visible(text: object, *, widest: int | None = None) -> str:
    """`text` with whatever could move a terminal's cursor spelled out; cut after `widest` characters."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
    return shown if widest is None or len(shown) <= widest else shown[: widest - 3] + "..."


def cause(error: BaseException) -> str:
    """One line: the message of an error of ours, else the type with it."""
    text = visible(" ".join(str(error).split()), widest=500)
    return text if isinstance(error, DetError) else f"{type(error).__name__}: {text}"


def plain_value(text: str | None) -> Any:
    """The value behind a JSON text; None if there is none."""
    return None if text is None else json.loads(text)


def value_text(value: str | None) -> str:
    """A value given as JSON text, as people read it: text without quotes, - for a value that is not there."""
    if value is None:
        return "-"
    loaded = plain_value(value)
    return visible(loaded if isinstance(loaded, str) else value, widest=_WIDEST_VALUE)


def header_text(name: str, value: str | None) -> str:
    """The value of a header's entry, given as JSON text; what stands for floats as decimal number and bits."""
    loaded = plain_value(value)
    of_floats = name.endswith(FLOAT_ENTRY) or name.split(".")[0] in FLOAT_PARTS
    numbers = loaded if isinstance(loaded, list) else [loaded]
    if of_floats and numbers and all(isinstance(each, str) and _BITS.fullmatch(each) for each in numbers):
        return visible(", ".join(f"{decimal(each)} ({each})" for each in numbers), widest=_WIDEST_VALUE)
    return value_text(value)


def header_name(name: str) -> str:
    """The name of a header's entry as people read it."""
    return visible(name.removesuffix(FLOAT_ENTRY))


def field_text(name: str, value: Any) -> str:
    """The value of a field of a record; floats as decimal number and bits."""
    if value is None:
        return "-"
    if name in FLOAT_FIELDS:
        if isinstance(value, list):
            return ", ".join(field_text(name, each) for each in value) or "-"
        if isinstance(value, dict) and name == "clip":
            return ", ".join(f"{visible(key)} {field_text(name, each)}" for key, each in sorted(value.items()))
        if isinstance(value, str):
            return f"{decimal(value)} ({visible(value, widest=16)})"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return visible(text, widest=_WIDEST_VALUE)


def decimal(bits: str) -> str:
    """The shortest decimal that reads back as the float with these bits; "?" if they are not those of a
    float.
    """
    try:
        value = bits_float(bits)
    except LedgerError:
        return "?"
    if len(bits) == 8 and value - value == 0:
        for digits in range(1, 10):
            text = f"{value:.{digits}g}"
            if struct.pack("<f", float(text)) == struct.pack("<f", value):
                return text
    return repr(value)


def say_table(rows: Sequence[Sequence[str]], *, heads: Sequence[str] = ()) -> None:
    """Aligned columns, indented; with a frame if stdout is a terminal and there are heads."""
    if heads and sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(table)
        return
    lines = [list(heads), *map(list, rows)] if heads else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)] if lines else []
    for line in lines:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function to report (done, total) to, shown on stderr if that is a terminal; None if it is not."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
