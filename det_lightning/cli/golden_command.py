"""det-lightning golden: keep the bits of a short run in a file, and check them in CI."""

from __future__ import annotations

import json

import typer

from det_lightning.cli import exit_codes
from det_lightning.cli.difference_text import difference_json
from det_lightning.cli.ledgers import headers_json
from det_lightning.cli.printing import say, say_json, visible


def record(
    path: str,
    *,
    entry: str | None,
    steps: int | None,
    arguments: str | None,
    global_batch: int | None,
    seed: int | None,
    strategy: str | None,
    precision: str | None,
) -> int:
    """Write the file, or write it anew with what it says of its run where nothing else is given."""
    from det_lightning.replay.golden import read_golden, record_golden

    given = {"steps": steps, "global_batch": global_batch, "seed": seed, "strategy": strategy, "precision": precision}
    chosen = {name: value for name, value in given.items() if value is not None}
    keyword = _arguments(arguments)
    if entry is None:
        old = read_golden(path)
        entry, chosen = old["entry"]["function"], old["run"] | chosen
        keyword = old["entry"]["arguments"] if keyword is None else keyword
    size = record_golden(path, entry, arguments=keyword, **chosen)
    say(
        f"recorded: {visible(path)}, {size} bytes; commit it, and check it with det-lightning golden check {visible(path)}"
    )
    return exit_codes.MATCH


def check(path: str, *, as_json: bool) -> int:
    """Run the golden steps again; exit code MATCH or DIVERGE."""
    from det_lightning.replay.golden import compare_golden, golden_message

    result = compare_golden(path)
    code = exit_codes.MATCH if result.difference is None else exit_codes.DIVERGE
    if as_json:
        first = None if result.difference is None else difference_json(result.difference)
        say_json({"exit_code": code, "first": first, "headers": headers_json(result.headers), "steps": result.steps})
    elif result.difference is None:
        changed = [f"{each.part} {visible(each.name)}" for each in result.headers]
        since = f", though {', '.join(changed[:5])} changed" if changed else ""
        say(f"match: steps 0 to {result.steps - 1} have the bits of {visible(path)}{since}")
    else:
        for line in golden_message(path, result).splitlines():
            say(visible(line))
    return code


def _arguments(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--arguments is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter('--arguments is a JSON object, such as {"width": 32}')
    return value
