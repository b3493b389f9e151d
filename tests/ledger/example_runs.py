"""Made-up runs for tests: ledgers whose digests are a pure function of (seed, kind, name, step), and changed
where asked.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from blake3 import blake3

from det_lightning.ledger.record import float_bits
from det_lightning.ledger.retention import Retention
from det_lightning.ledger.store import LedgerReader, LedgerWriter

NAMES = ("layer.0.bias", "layer.0.weight", "layer.2.bias", "layer.2.weight")
RECIPE = {"seed": 1, "global_batch": 24, "model": {"digest": "5f3a"}}
ENVIRONMENT = {"world_size": 1, "versions": {"torch": "2.13.0"}}
ENTRY = {"build": "examples.mlp:build"}

Change = tuple[int, str, str]  # from this step on, this kind, this tensor


def agree_and_leaves(step: int, *, names=NAMES, kinds=("weights", "gradients"), changes: Iterable[Change] = ()):
    """The agreeing fields and the leaves of one step."""
    leaves = {
        kind: {
            name: blake3(f"{kind} {name} {step} {_changed(changes, step, kind, name)}".encode()).digest()[:16]
            for name in names
        }
        for kind in kinds
        if step > 0 or kind != "gradients"
    }
    agree = {
        "step": step,
        "epoch": step // 10,
        "sample_ids": f"{step * 7:016x}" if step else None,
        "sample_bytes": f"{step * 11:016x}" if step else None,
        "loss": float_bits(1.0 / step) if step else None,
        "learning_rates": [float_bits(0.1)] if step else None,
        "clip": None,
    }
    return agree, leaves


def _changed(changes: Iterable[Change], step: int, kind: str, name: str) -> bool:
    return any(step >= first and (kind, name) == (of, which) for first, of, which in changes)


def append_steps(
    writer: LedgerWriter,
    steps: Iterable[int],
    *,
    fields: Mapping[int, Mapping[str, object]] | None = None,
    **options,
) -> None:
    """Append made-up records; fields: step -> agreeing fields to replace there."""
    for step in steps:
        agree, leaves = agree_and_leaves(step, **options)
        writer.append({**agree, **(fields or {}).get(step, {})}, leaves, {"time_ns": 1000 + step})


def write_run(
    path: Path,
    steps: int = 8,
    *,
    first: int = 0,
    recipe: Mapping = RECIPE,
    environment: Mapping = ENVIRONMENT,
    resumed_from: Mapping | None = None,
    close: bool = True,
    retention: Retention | None = None,
    **options,
) -> Path:
    """Write a run of records `first` .. `steps` and return its path; options as for `append_steps`."""
    writer = LedgerWriter.create(
        path, recipe=recipe, environment=environment, entry=ENTRY, resumed_from=resumed_from, retention=retention
    )
    append_steps(writer, range(first, steps + 1), **options)
    if close:
        writer.close()
    else:
        writer.abandon()
    return path


def trace_at(path: Path, step: int) -> str:
    with LedgerReader(path) as reader:
        return reader.record(step).trace
