"""How one line of ledger.jsonl is spelled and checked.

A line is canonical JSON with a "kind", a "chain" (BLAKE3 of the line before, so no line can be changed,
dropped or moved unseen) and a "seal" (BLAKE3 of the line itself without the seal, so a damaged line is known
wherever a search lands on it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from blake3 import blake3

from det_lightning.errors import LedgerError
from det_lightning.ledger.record import FIRST_TRACE, KINDS, LEAF_BYTES, LeafPlace, Record, canonical_json, spelled

FORMAT = 1
LEDGER_FILE = "ledger.jsonl"
FIRST_CHAIN = "00" * 32
MAX_LINE_BYTES = 1 << 26

_ANY_LINE = {"kind": str, "chain": str, "seal": str}
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "header": {
        "format": int,
        "recipe": dict,
        "environment": dict,
        "entry": dict,
        "resumed_from": (dict, type(None)),
    },
    # id: byte offset of this very line, so that a record leads to its layout without a search
    "layout": {"of": str, "id": int, "names": list},
    # segment: byte offset of the header or seam that opened the stretch of steps this record belongs to
    "record": {"step": int, "agree": dict, "facts": dict, "leaves": dict, "trace": str, "segment": int},
    # previous_segment: byte offset of the header or seam that opened the stretch before
    "seam": {"step": int, "trace": str, "torn_bytes": int, "environment": dict, "previous_segment": int},
    "checkpoint": {"step": int, "path": str, "digest": str},
    # the files of this part may be gone from here on
    "dropped": {"part": int},
    "closed": {"records": int, "last_step": int},
}


def encode_line(kind: str, fields: Mapping[str, Any], chain: str) -> bytes:
    """The whole line, newline included. Raises LedgerError if a field cannot be written."""
    body = {**fields, "kind": kind, "chain": chain}
    body["seal"] = blake3(canonical_json(body)).hexdigest()
    line = spelled(body) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise LedgerError(
            f"a {kind} line would take {len(line)} bytes; a line of a ledger takes at most {MAX_LINE_BYTES}"
        )
    return line


def chain_of(line: bytes) -> str:
    """What the line after `line` must carry as its chain; line: without the newline."""
    return blake3(line).hexdigest()


def decode_line(line: bytes) -> dict[str, Any]:
    """The fields of a line (given without its newline).

    Raises LedgerError, without naming the place, if it is not a sound line by itself.
    """
    try:
        body = json.loads(line.decode("utf-8"), parse_float=_refuse_number, parse_constant=_refuse_number)
    except UnicodeDecodeError as error:
        raise LedgerError(f"it is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise LedgerError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise LedgerError(f"it is not JSON as a ledger writes it ({str(error)[:100]})") from None
    if not isinstance(body, dict):
        raise LedgerError(f"it holds a JSON {type(body).__name__} where an object is expected")
    _check_fields(body)
    _check_seal(body, line)
    return body


def _refuse_number(text: str) -> None:
    raise ValueError(f"the number {text[:40]} is not an integer")


def _check_fields(body: dict[str, Any]) -> None:
    kind = body.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise LedgerError(f"its kind is {kind!r:.80}; known kinds: {', '.join(_FIELDS)}")
    expected = _FIELDS[kind] | _ANY_LINE
    if body.keys() != expected.keys():
        wrong = sorted(body.keys() ^ expected.keys())
        raise LedgerError(f"as a {kind} line it has missing or unknown fields: {', '.join(wrong)[:200]}")
    for name, types in expected.items():
        if not isinstance(body[name], types) or isinstance(body[name], bool):
            raise LedgerError(f"its field {name} is {type(body[name]).__name__} {body[name]!r:.60}")
        if isinstance(body[name], int) and body[name] < 0:
            raise LedgerError(f"its field {name} is {body[name]}, below zero")
    for name in ("chain", "seal", "trace"):
        if name in body and not is_digest(body[name]):
            raise LedgerError(f"its field {name} is {body[name]!r:.80}, not the hex of 32 bytes")


def _check_seal(body: dict[str, Any], line: bytes) -> None:
    try:
        unsealed = spelled({name: value for name, value in body.items() if name != "seal"})
        same_spelling = spelled(body) == line
    except LedgerError as error:
        raise LedgerError(f"it cannot be spelled canonically: {error}") from None
    if blake3(unsealed).hexdigest() != body["seal"]:
        raise LedgerError("its seal does not fit its content: the line was changed after it was written")
    if not same_spelling:
        raise LedgerError("it is not spelled canonically: the line was changed after it was written")


def is_digest(text: Any) -> bool:
    """Whether `text` is the lower-case hex of 32 bytes."""
    return isinstance(text, str) and len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)


def record_of(body: Mapping[str, Any]) -> Record:
    """The record in the fields of a record line.

    Raises LedgerError if step, roots or leaves have the wrong shape.
    """
    agree, leaves = body["agree"], {}
    if agree.get("step") != body["step"] or isinstance(agree.get("step"), bool):
        raise LedgerError(
            f"its step {body['step']} and the step among its agreeing fields {agree.get('step')!r:.40} differ"
        )
    roots = agree.get("roots")
    if not isinstance(roots, dict) or not all(value is None or is_digest(value) for value in roots.values()):
        raise LedgerError("its roots are not a list of kinds with the hex of 32 bytes (or null) each")
    for kind, place in body["leaves"].items():
        if kind not in KINDS:
            raise LedgerError(f"it names leaves of kind {kind!r:.40}; known kinds: {', '.join(KINDS)}")
        if (
            not isinstance(place, list)
            or len(place) not in (2, 3)
            or not all(type(number) is int and 0 <= number < 1 << 63 for number in place)
        ):
            raise LedgerError(
                f"its place of the {kind} leaves is {place!r:.60}, not [layout id, byte offset] and a part"
            )
        if place[1] % LEAF_BYTES:
            raise LedgerError(f"its {kind} leaves start at byte {place[1]}, not a multiple of {LEAF_BYTES}")
        leaves[kind] = LeafPlace(*place)
    return Record(step=body["step"], agree=agree, facts=body["facts"], leaves=leaves, trace=body["trace"])


def layout_names(body: Mapping[str, Any], *, kind: str, layout_id: int) -> list[str]:
    """The tensor names of a layout line.

    Raises LedgerError if it is the layout of something else or its names are not sorted text.
    """
    if body["kind"] != "layout" or body["of"] != kind or body["id"] != layout_id:
        raise LedgerError(f"it is not the layout {layout_id} of {kind}")
    names = body["names"]
    if not all(isinstance(name, str) for name in names) or any(a >= b for a, b in pairwise(names)):
        raise LedgerError("its names are not text in rising order")
    return names


def start_trace(header: Mapping[str, Any]) -> str:
    """The trace before the first record: zeros, or what the header's resumed_from names.

    Raises LedgerError if that is no trace.
    """
    resumed = header["resumed_from"]
    if resumed is None:
        return FIRST_TRACE
    if not is_digest(resumed.get("trace")) or type(resumed.get("step")) is not int:
        raise LedgerError(
            f"resumed_from must name step (an integer) and trace (the hex of 32 bytes), not {resumed!r:.120}"
        )
    return resumed["trace"]
