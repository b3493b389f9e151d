"""What differs between two ledgers: their headers, and one step of both.

Pure comparison; the search over steps is in bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from det_lightning.errors import LedgerError
from det_lightning.ledger.leaf_file import leaf_path
from det_lightning.ledger.reader import LedgerReader, Resume
from det_lightning.ledger.record import Record, canonical_json, root

STATE_KINDS = ("weights", "optimizer", "buffers")
"""The kinds that a step begins with; gradients are its own."""
HEADER_PARTS = ("recipe", "environment", "entry")
# In each part, the names that most often explain why two runs differ, the likeliest first.
_LIKELY = {
    "recipe": "seed optimizers schedulers clip precision arithmetic model global_batch data contract".split(),
    "environment": "device gpu processor isa git versions kernels cuda_kernels nvrtc engine flags world_size "
    "accumulate threads python".split(),
    "entry": "function arguments seed trainer".split(),
}


@dataclass(frozen=True)
class HeaderDifference:
    """One entry of two headers that differs. part: recipe, environment or entry; name: keys joined by dots.

    reference, candidate: the values as JSON text, None where the header lacks the entry.
    """

    part: str
    name: str
    reference: str | None
    candidate: str | None


@dataclass(frozen=True)
class FieldDifference:
    """A field that must agree and does not; values as JSON text, None where the record lacks it."""

    name: str
    reference: str | None
    candidate: str | None

    @property
    def one_sided(self) -> bool:
        """Whether only one of the two runs recorded it; that shows nothing about the runs."""
        return self.reference is None or self.candidate is None


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose digests (hex of 16 bytes) differ; None where a run has no tensor of that name."""

    kind: str
    name: str
    reference: str | None
    candidate: str | None


@dataclass(frozen=True)
class ResumedState:
    """A run that was resumed after `step`. side: reference or candidate; unlike: kind and name of each tensor, or of a kind
    without leaves, in which the state that it went on with is not the one that it had recorded there."""

    side: str
    step: int
    unlike: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """How two runs differ at `step`.

    last_match: the step before, if both runs have it and agree there; else None.
    fields: fields other than roots that differ. roots: kinds of state whose roots differ, as fields named by
    kind.
    tensors: the tensors behind those roots. kinds_without_leaves: kinds whose root differs, but whose tensors
    were not kept.
    agreeing: names of fields and kinds that both recorded, with equal values; a kind without a tensor is left
    out.
    resumed: the sides that were resumed between the step before and this one.
    not_recorded_before: kinds of state that this record has, but that of `last_match` has not on some side, as where a kind
    is recorded every so many steps: they may have differed for longer.
    """

    step: int
    last_match: int | None
    fields: tuple[FieldDifference, ...]
    roots: tuple[FieldDifference, ...]
    tensors: tuple[TensorDifference, ...]
    kinds_without_leaves: tuple[str, ...]
    agreeing: tuple[str, ...]
    resumed: tuple[ResumedState, ...] = ()
    not_recorded_before: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether something that both runs recorded differs."""
        return any(not each.one_sided for each in (*self.fields, *self.roots))


Leaves = Mapping[str, str]
_ROOT_OF_NOTHING = root({})


def header_differences(reference: LedgerReader, candidate: LedgerReader) -> tuple[HeaderDifference, ...]:
    """In the order in which they are likely to be the cause: recipe, data; hardware, code and versions, the rest."""
    found = []
    for part in HEADER_PARTS:
        ours, theirs = flat_header(reference.header[part]), flat_header(candidate.header[part])
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                found.append(HeaderDifference(part, name, ours.get(name), theirs.get(name)))
    return tuple(sorted(found, key=_unlikelihood))


def _unlikelihood(difference: HeaderDifference) -> tuple[int, int, str]:
    likely = _LIKELY[difference.part]
    place = next((place for place, name in enumerate(likely) if difference.name.split(".")[0] == name), len(likely))
    return HEADER_PARTS.index(difference.part), place, difference.name


def record_difference(
    reference: Record,
    candidate: Record,
    *,
    leaves: Callable[[str], tuple[Leaves | None, Leaves | None]],
    last_match: int | None = None,
    resumed: tuple[ResumedState, ...] = (),
    before: Sequence[Record] = (),
) -> Difference:
    """Compare two records of one step.

    leaves: kind -> name -> digest in hex, for both sides (None: not kept); asked for where both have a root.
    before: the records of `last_match`, if there is one.
    """
    fields, agreeing_fields = _differing(
        {name: value for name, value in reference.agree.items() if name != "roots"},
        {name: value for name, value in candidate.agree.items() if name != "roots"},
    )
    roots, agreeing_kinds = _differing(reference.agree["roots"], candidate.agree["roots"])
    tensors: list[TensorDifference] = []
    without = []
    for kind in (each.name for each in roots if not each.one_sided):
        ours, theirs = leaves(kind)
        if ours is None or theirs is None:
            without.append(kind)
            continue
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                tensors.append(TensorDifference(kind, name, ours.get(name), theirs.get(name)))
    return Difference(
        step=reference.step,
        last_match=last_match,
        fields=fields,
        roots=roots,
        tensors=tuple(tensors),
        kinds_without_leaves=tuple(without),
        agreeing=agreeing_fields
        + tuple(kind for kind in agreeing_kinds if reference.agree["roots"][kind] != _ROOT_OF_NOTHING),
        resumed=resumed,
        not_recorded_before=tuple(
            kind
            for kind in STATE_KINDS
            if None not in (reference.agree["roots"].get(kind), candidate.agree["roots"].get(kind))
            and any(each.agree["roots"].get(kind) is None for each in before)
        ),
    )


def difference_at(
    reference: LedgerReader, candidate: LedgerReader, step: int, *, last_match: int | None = None
) -> Difference:
    """Compare the records of `step`.

    Raises LedgerError if either ledger lacks it or its leaves do not fit their root.
    """
    ours, theirs = reference.record(step), candidate.record(step)
    return record_difference(
        ours,
        theirs,
        leaves=lambda kind: (checked_leaves(reference, ours, kind), checked_leaves(candidate, theirs, kind)),
        last_match=last_match,
        before=() if last_match is None else (reference.record(last_match), candidate.record(last_match)),
        resumed=tuple(
            ResumedState(side, resume.step, resume.unlike)
            for side, reader in (("reference", reference), ("candidate", candidate))
            if (resume := _resumed_before(reader, step)) is not None
        ),
    )


def _resumed_before(reader: LedgerReader, step: int) -> Resume | None:
    """The new start between the records of `step` - 1 and `step`. A later one that goes further back takes its place."""
    last = next((each for each in reversed(reader.resumes) if each.step < step), None)
    return last if last is not None and last.step == step - 1 else None


def checked_leaves(reader: LedgerReader, record: Record, kind: str) -> dict[str, str] | None:
    """The leaves of `kind`, None if the record has none or they were dropped.

    Raises LedgerError if they do not have the root the record names.
    """
    if not reader.keeps_leaves(record, kind):
        return None
    leaves = reader.leaves(record, kind)
    if root({name: bytes.fromhex(digest) for name, digest in leaves.items()}) != record.agree["roots"].get(kind):
        raise LedgerError(
            f"{reader.path}: the {kind} leaves of step {record.step} do not have the root that the record "
            "names; "
            f"{leaf_path(reader.path, kind, record.leaves[kind].part).name} is damaged"
        )
    return leaves


def _differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[tuple[FieldDifference, ...], tuple[str, ...]]:
    """The fields that differ, and the names of those that both have (not null) with equal values."""
    differing, agreeing = [], []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = _text(ours.get(name)), _text(theirs.get(name))
        if one != other:
            differing.append(FieldDifference(name, one, other))
        elif one is not None:
            agreeing.append(name)
    return tuple(differing), tuple(agreeing)


def _text(value: Any) -> str | None:
    return None if value is None else canonical_json(value).decode("utf-8")


def flat_header(value: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings, and lists of them, as one: keys and places joined by dots, values as JSON text."""
    flat: dict[str, str] = {}
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        nested = isinstance(item, list) and any(isinstance(each, dict | list) for each in item)
        if nested or (isinstance(item, dict) and item):
            flat |= flat_header(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = canonical_json(item).decode("utf-8")
    return flat
