"""What one record of a ledger says, and how its words become bytes: canonical JSON, float bits, roots and
traces.

A *trace* binds a record to everything before it: trace(n) = BLAKE3(trace(n-1) || canonical JSON of agree(n)).
Two runs are the same up to a record exactly if their traces there are equal, so one comparison answers for
all earlier steps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from blake3 import blake3

from det_lightning.errors import LedgerError

KINDS = ("weights", "gradients", "optimizer", "buffers")
FIRST_TRACE = "00" * 32
LEAF_BYTES = 16

# format name: (struct code of the float, struct code of its bits, bits of the one NaN that is written)
_FLOAT_FORMATS = {
    "float64": ("<d", "<Q", 0x7FF8000000000000),
    "float32": ("<f", "<I", 0x7FC00000),
    "float16": ("<e", "<H", 0x7E00),
}


class LeafPlace(NamedTuple):
    """Where a row of leaves lies: layout_id names its tensors; offset: byte in leaves-<kind>.bin, or, where there is a
    part, in leaves-<kind>-<part>.bin.
    """

    layout_id: int
    offset: int
    part: int | None = None


@dataclass(frozen=True)
class Record:
    """One record of a ledger.

    step: optimizer steps done; record 0 is the state before the first one.
    agree: the fields in which two equal runs must agree, with the digest of each kind of state in
    agree["roots"].
    facts: everything else (times, ranks); never compared.
    leaves: kind -> where its row was written; it may have been dropped since.
    trace: hex of 32 bytes, binds this record to all earlier ones.
    """

    step: int
    agree: Mapping[str, Any]
    facts: Mapping[str, Any]
    leaves: Mapping[str, LeafPlace]
    trace: str


def canonical_json(value: Any) -> bytes:
    """The one spelling of `value`: keys sorted, no spaces, UTF-8.

    Raises LedgerError for a float (write float_bits) or any type beyond int, str, bool, None, list and dict.
    """
    _refuse_other_types(value, "value")
    return spelled(value)


def spelled(value: Any) -> bytes:
    """`canonical_json` for a value that is known to hold only the allowed types, as one that was read from
    JSON.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LedgerError(f"a ledger holds UTF-8 text only; {error.object!r:.80} has a lone surrogate") from None
    except RecursionError:
        raise LedgerError("a ledger cannot hold a value that is nested so deeply") from None
    except ValueError as error:
        raise LedgerError(f"a ledger cannot hold this value: {error}") from None


def _refuse_other_types(value: Any, place: str, depth: int = 0) -> None:
    if depth > 64:
        raise LedgerError(f"{place[:80]}... is nested more than 64 levels deep; a ledger line must be flatter")
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_other_types(item, f"{place}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerError(f"{place} has the key {key!r}; keys of a ledger line are strings")
            _refuse_other_types(item, f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, float):
        raise LedgerError(f"{place} is the float {value!r}; write float_bits(x), so that the ledger keeps its bits")
    else:
        raise LedgerError(
            f"{place} is a {type(value).__name__}; a ledger holds int, str, bool, None, list and dict only"
        )


def float_bits(value: Any) -> str:
    """Hex of the IEEE bits of a float: 16 digits for a Python float, int or float64 scalar, 8 for float32, 4
    for float16 or bfloat16 (numpy or torch scalars). NaNs are written as the canonical one.
    """
    name = str(getattr(value, "dtype", "float64")).removeprefix("torch.")
    number = float(value)
    if name == "bfloat16":
        return float_bits_of(number, "float32")[:4]
    return float_bits_of(number, name)


def float_bits_of(number: float, name: str) -> str:
    """Hex of the bits of `number` in the named format; `number` must be exact in it (a float read from that
    format is).
    """
    if name not in _FLOAT_FORMATS:
        raise LedgerError(f"no float bits for dtype {name}; allowed: bfloat16, {', '.join(sorted(_FLOAT_FORMATS))}")
    float_code, bits_code, nan_bits = _FLOAT_FORMATS[name]
    if number != number:
        bits = nan_bits
    else:
        (bits,) = struct.unpack(bits_code, struct.pack(float_code, number))
    return f"{bits:0{2 * struct.calcsize(bits_code)}x}"


def bits_float(bits: str) -> float:
    """The float whose float64 (16 digits) or float32 (8 digits) bits are given in hex.

    Raises LedgerError for other text.
    """
    name = {16: "float64", 8: "float32"}.get(len(bits))
    if name is None or not set(bits) <= set("0123456789abcdef"):
        raise LedgerError(f"{bits!r:.40} is not the hex of a float64 (16 digits) or a float32 (8 digits)")
    float_code, bits_code, _ = _FLOAT_FORMATS[name]
    return struct.unpack(float_code, struct.pack(bits_code, int(bits, 16)))[0]


_FLOAT_KEY = "float64"


def with_float_bits(value: Any) -> Any:
    """`value` with every Python float in nested lists and dicts as {"float64": bits}, so that a ledger can hold it."""
    if isinstance(value, float):
        return {_FLOAT_KEY: float_bits(value)}
    if isinstance(value, (list, tuple)):
        return [with_float_bits(each) for each in value]
    if isinstance(value, dict):
        return {key: with_float_bits(each) for key, each in value.items()}
    return value


def with_floats(value: Any) -> Any:
    """What `with_float_bits` was given, tuples as lists. Raises LedgerError for bits that are none."""
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_FLOAT_KEY} and isinstance(value[_FLOAT_KEY], str):
            return bits_float(value[_FLOAT_KEY])
        return {key: with_floats(each) for key, each in value.items()}
    return value


def next_trace(previous_trace: str, agree: Mapping[str, Any]) -> str:
    """Trace of the record that follows the one with `previous_trace` and whose agreeing fields are `agree`:
    hex of 32 bytes.
    """
    return blake3(bytes.fromhex(previous_trace) + canonical_json(dict(agree))).hexdigest()


def root(digests: Mapping[str, bytes]) -> str:
    """One digest for named tensor digests, whatever the order of the mapping: hex of BLAKE3 over (name,
    digest) sorted by name, each preceded by its length in bytes (8 bytes, little-endian).
    """
    names = sorted(digests)
    return root_of_row(root_prefixes(names), b"".join(digests[name] for name in names))


def root_prefixes(names: Iterable[str]) -> list[bytes]:
    """What precedes each digest in a root: length and UTF-8 of the name, length of the digest.

    Worked out once per layout.
    """
    prefixes = []
    for name in names:
        try:
            encoded = name.encode("utf-8")
        except UnicodeEncodeError:
            raise LedgerError(f"the tensor name {name!r:.80} is not valid Unicode text") from None
        prefixes.append(struct.pack("<Q", len(encoded)) + encoded + struct.pack("<Q", LEAF_BYTES))
    return prefixes


def root_of_row(prefixes: list[bytes], row: bytes) -> str:
    """The root of digests laid end to end in the order of `prefixes`; row: 16 bytes each.

    Raises LedgerError if the lengths disagree.
    """
    if len(row) != LEAF_BYTES * len(prefixes):
        raise LedgerError(
            f"{len(prefixes)} tensor digests take {LEAF_BYTES * len(prefixes)} bytes, but {len(row)} were "
            f"given; each digest is {LEAF_BYTES} bytes"
        )
    pieces: list[bytes] = []
    for index, prefix in enumerate(prefixes):
        pieces.append(prefix)
        pieces.append(row[LEAF_BYTES * index : LEAF_BYTES * (index + 1)])
    return blake3(b"".join(pieces)).hexdigest()
