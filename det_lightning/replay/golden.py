"""Golden runs: a few steps of a user's own training, kept as a small file in their repository and run again by their CI."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_lightning.errors import DivergenceError, InputError, LedgerError
from det_lightning.ledger.compare import Difference, HeaderDifference, flat_header, record_difference
from det_lightning.ledger.explanation import explanation
from det_lightning.ledger.lines import is_digest
from det_lightning.ledger.record import KINDS, Record, bits_float, with_float_bits
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.replay import run_plan
from det_lightning.replay.run import ReplayPlan

FORMAT = 1
MOST_BYTES = 1 << 26
_LEAF_DIGITS = 8  # of the 32: enough to name a tensor; the roots decide
_ENVIRONMENT = ("processor", "versions", "kernels", "python", "platform")
_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed", "64-true")
_FIELDS = {"format": int, "entry": dict, "run": dict, "recipe": dict, "environment": dict, "names": dict, "steps": list}


@dataclass(frozen=True)
class GoldenResult:
    """What a run of the golden steps showed.

    Attributes:
        difference: the first step that differs, None if all agree.
        headers: what else is not as it was recorded: recipe first, then the environment.
        steps: how many were compared.
    """

    difference: Difference | None
    headers: tuple[HeaderDifference, ...]
    steps: int


def record_golden(
    path: str | Path,
    entry: str,
    *,
    steps: int = 5,
    arguments: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    seed: int = 0,
    strategy: str = "det",
    precision: str = "32-true",
) -> int:
    """Trains `steps` steps of the run that `entry` ("package.module:function") builds, and writes the golden file.

    Args:
        global_batch: of the run; by default the DataLoader's batch_size.
        seed: of the order and, by seed_everything, of everything else.
        strategy: "det" or "auto", the stock strategy on one device.
        precision: as the Trainer takes it.

    Returns:
        How many bytes the file has.

    Raises:
        InputError: an argument is outside what is allowed, or the run ends before `steps`.
    """
    if steps < 1 or strategy not in ("det", "auto") or precision not in _PRECISIONS:
        raise InputError(
            f"a golden run has at least 1 step of strategy det or auto in one of {', '.join(_PRECISIONS)}; got {steps} "
            f"steps of {strategy!r} in {precision!r}"
        )
    run = {"steps": steps, "global_batch": global_batch, "seed": seed, "strategy": strategy, "precision": precision}
    content = {
        "format": FORMAT,
        "entry": {"function": entry, "arguments": with_float_bits(dict(arguments or {}))},
        "run": run,
    }
    content |= _train(content)
    if len(content["steps"]) != steps + 1:
        raise InputError(f"the run of {entry} ended after {len(content['steps']) - 1} steps; ask for that many at most")
    data = (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")
    Path(path).write_bytes(data)
    return len(data)


def compare_golden(path: str | Path) -> GoldenResult:
    """Runs the golden steps again and compares them.

    Raises:
        LedgerError: the file is not a golden file. What the user's code raises passes through.
    """
    golden = read_golden(path)
    now = _train(golden)
    headers = tuple(
        HeaderDifference(part, name, ours.get(name), theirs.get(name))
        for part in ("recipe", "environment")
        for ours, theirs in [(flat_header(golden[part]), flat_header(now[part]))]
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
    for before, after in zip(golden["steps"], now["steps"], strict=False):
        if before["trace"] == after["trace"]:
            continue
        step = before["agree"]["step"]
        difference = record_difference(
            _record(before),
            _record(after),
            leaves=lambda kind, one=before, other=after: (_leaves(golden, one, kind), _leaves(now, other, kind)),
            last_match=step - 1 if step else None,
        )
        if difference.found:
            return GoldenResult(difference, headers, step + 1)
    if len(now["steps"]) < len(golden["steps"]):
        raise LedgerError(f"the run ends after {len(now['steps']) - 1} steps; {path} has {len(golden['steps']) - 1}")
    return GoldenResult(None, headers, len(golden["steps"]))


def check_golden(path: str | Path) -> None:
    """For a test of your own: `def test_bits(): check_golden("tests/golden.json")`.

    Raises:
        DivergenceError: the bits are no longer those of the golden file; the message says from which step, which tensor
            is the first, what else has changed, and how to accept the change.
        LedgerError: the file is not a golden file.
    """
    result = compare_golden(path)
    if result.difference is not None:
        raise DivergenceError(golden_message(path, result), step=result.difference.step)


def golden_message(path: str | Path, result: GoldenResult) -> str:
    """Several lines that say what changed since the golden file was recorded."""
    difference = result.difference
    names = [each.name for each in (*difference.fields, *difference.roots) if not each.one_sided]
    lines = [f"the bits are no longer those of {path}: step {difference.step} differs in {', '.join(names)}"]
    if difference.last_match is not None:
        lines.append(f"  steps 0 to {difference.last_match} agree")
    for each in difference.tensors[:3]:
        lines.append(f"  {each.kind} {each.name}: {each.reference or '-'} -> {each.candidate or '-'}")
    if len(difference.tensors) > 3:
        lines.append(f"  ... {len(difference.tensors)} tensors in all")
    if meaning := explanation(difference):
        lines.append(f"  {meaning}")
    for each in result.headers[:6]:
        lines.append(f"  {each.part} {each.name}: {_readable(each.reference)} -> {_readable(each.candidate)}")
    lines.append(f"if the change is wanted, record it anew: det-lightning golden record {path}")
    return "\n".join(lines)


def _readable(value: str | None) -> str:
    """A header's value, given as JSON text; what stands for a float as decimal number and bits."""
    if value is None:
        return "-"
    loaded = json.loads(value)
    if isinstance(loaded, list):
        return f"[{', '.join(_readable(json.dumps(each)) for each in loaded)}]"
    if isinstance(loaded, str) and re.fullmatch("[0-9a-f]{16}", loaded):
        return f"{bits_float(loaded)!r} ({loaded})"
    return value


def read_golden(path: str | Path) -> dict[str, Any]:
    """The content of a golden file. Raises LedgerError with what is wrong if it is not one."""
    path = Path(path)
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise LedgerError(f"{path} is no file of at most {MOST_BYTES} bytes")
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is no golden file: {str(error)[:200]}") from None
    if not isinstance(content, dict) or any(not isinstance(content.get(name), kind) for name, kind in _FIELDS.items()):
        raise LedgerError(f"{path} is no golden file: it lacks one of {', '.join(_FIELDS)}, or has another type there")
    if content["format"] != FORMAT:
        raise LedgerError(f"{path} has golden format {content['format']}; this version reads format {FORMAT}")
    run, steps = content["run"], content["steps"]
    sound = (
        isinstance(content["entry"].get("function"), str)
        and isinstance(content["entry"].get("arguments"), dict)
        and type(run.get("steps")) is int
        and 1 <= run["steps"] == len(steps) - 1
        and run.get("strategy") in ("det", "auto")
        and run.get("precision") in _PRECISIONS
        and type(run.get("seed")) is int
        and (run.get("global_batch") is None or type(run["global_batch"]) is int)
        and all(
            isinstance(row, list) and all(isinstance(each, str) for each in row) for row in content["names"].values()
        )
        and all(_is_step(content, each, number) for number, each in enumerate(steps))
    )
    if not sound:
        raise LedgerError(
            f"{path} is no sound golden file: its entry, run or steps are not as golden record writes them"
        )
    return content


def _is_step(content: dict[str, Any], step: Any, number: int) -> bool:
    if (
        not isinstance(step, dict)
        or not isinstance(step.get("agree"), dict)
        or not isinstance(step.get("leaves"), dict)
    ):
        return False
    roots = step["agree"].get("roots")
    names = content["names"]
    return (
        step["agree"].get("step") == number
        and is_digest(step.get("trace"))
        and isinstance(roots, dict)
        and all(kind in KINDS and (value is None or is_digest(value)) for kind, value in roots.items())
        and all(
            (kind in KINDS and isinstance(row, str) and len(row) == _LEAF_DIGITS * len(names.get(kind, [])))
            or row == ""
            for kind, row in step["leaves"].items()
        )
    )


def _train(golden: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the steps and returns recipe, environment, names and steps."""
    run = golden["run"]
    with tempfile.TemporaryDirectory(prefix="det-lightning-golden-") as scratch:
        out = Path(scratch, "ledger")
        data = {"global_batch": run["global_batch"], "seed": run["seed"]}
        recipe = {"arithmetic": "stock SingleDeviceStrategy", "data": None}
        if run["strategy"] == "det":
            recipe = {"arithmetic": "det", "data": data}
        plan = ReplayPlan(
            reference=None,
            recipe=recipe | {"precision": run["precision"]},
            entry={**with_float_bits(golden["entry"]), "seed": run["seed"]},
            recording_of=dict.fromkeys(KINDS, 1),
            out=out,
            stop=run["steps"],
            checkpoint=None,
            world_size=1,
            accumulate=1,
            override=golden["entry"]["function"],  # given by its user, in a file of their own repository
        )
        run_plan(plan)
        with LedgerReader(out) as reader:
            records = list(reader.records())
            names = {kind: reader.row(records[-1], kind)[0] for kind in KINDS}
            return {
                "recipe": reader.recipe,
                "environment": {name: reader.environment[name] for name in _ENVIRONMENT},
                "names": names,
                "steps": [_step(reader, record, names) for record in records],
            }


def _step(reader: LedgerReader, record: Record, names: Mapping[str, list[str]]) -> dict[str, Any]:
    leaves = {}
    for kind in KINDS:
        found = reader.leaves(record, kind)
        leaves[kind] = (
            "".join(found[name][:_LEAF_DIGITS] for name in names[kind]) if sorted(found) == names[kind] else ""
        )
    return {"agree": dict(record.agree), "trace": record.trace, "leaves": leaves}


def _record(step: Mapping[str, Any]) -> Record:
    return Record(step=step["agree"]["step"], agree=step["agree"], facts={}, leaves={}, trace=step["trace"])


def _leaves(golden: Mapping[str, Any], step: Mapping[str, Any], kind: str) -> dict[str, str] | None:
    row, names = step["leaves"].get(kind) or "", golden["names"].get(kind) or []
    if len(row) != _LEAF_DIGITS * len(names) or not names:
        return None
    return {name: row[_LEAF_DIGITS * i : _LEAF_DIGITS * (i + 1)] for i, name in enumerate(names)}
