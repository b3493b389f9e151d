"""A run as far as its states were kept: a ledger, a checkpoint, or a directory of checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from det_lightning.bisection.search import DIVERGE, MATCH, UNKNOWN, Verdict, first_divergent
from det_lightning.errors import LedgerError
from det_lightning.ledger.lines import LEDGER_FILE
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay.checkpoint_state import (
    OPTIMIZER,
    STATE_DICT,
    SUFFIXES,
    SavedState,
    load_checkpoint,
    read_state,
)

_MOST_CHECKPOINTS = 10_000


class SavedRun:
    """The states of one run by step. Close it after use.

    Attributes:
        path: as given.
        ledger: its reader, or None for checkpoints alone.
        checkpoints: step -> file; of a ledger, those that its run noted and that are still there.

    Raises:
        LedgerError: there is neither a ledger nor a checkpoint, or two checkpoints claim one step.
    """

    def __init__(self, path: Path):
        self.path = path
        self.ledger = LedgerReader(path) if (path / LEDGER_FILE).is_file() else None
        if self.ledger is not None:
            self.checkpoints = {
                each.step: Path(each.path) for each in self.ledger.checkpoints() if Path(each.path).is_file()
            }
            return
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
        if not files or len(files) > _MOST_CHECKPOINTS:
            raise LedgerError(f"{path} holds {len(files)} checkpoints ({', '.join(SUFFIXES)}) and no {LEDGER_FILE}")
        self.checkpoints = {}
        for file in files:
            step = load_checkpoint(file)["global_step"]
            if step in self.checkpoints and read_state(file) != read_state(self.checkpoints[step]):
                raise LedgerError(
                    f"{self.checkpoints[step]} and {file} are unlike states of one step, {step}: they belong to two runs, "
                    f"or to one that was resumed; give the checkpoints of one run"
                )
            self.checkpoints.setdefault(step, file)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def __enter__(self) -> "SavedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def words(self) -> str:
        if self.ledger is not None:
            return f"ledger, steps {self.ledger.first_step} to {self.ledger.last_step}"
        steps = sorted(self.checkpoints)
        return f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}, steps {', '.join(map(str, steps[:8]))}" + (
            ", ..." if len(steps) > 8 else ""
        )

    def holds(self, step: int) -> bool:
        if self.ledger is None:
            return step in self.checkpoints
        if self.ledger.first_step is None or not self.ledger.first_step <= step <= self.ledger.last_step:
            return False
        return self.ledger.keeps_leaves(self.ledger.record(step), "weights")

    def state(self, step: int) -> SavedState:
        """The state after `step`. Raises LedgerError if it cannot be read."""
        if self.ledger is None:
            return read_state(self.checkpoints[step])
        record = self.ledger.record(step)
        leaves = {kind: self.ledger.leaves(record, kind) for kind in ("weights", "buffers", "optimizer")}
        tensors = {STATE_DICT: leaves["weights"] | leaves["buffers"], OPTIMIZER: leaves["optimizer"]}
        return SavedState(step, tensors, {}, unnamed_optimizer=False)


@dataclass(frozen=True)
class StateDifference:
    """How two states of one step differ: (name, reference, candidate) each, None where one side lacks it."""

    step: int
    tensors: tuple[tuple[str, str | None, str | None], ...]
    settings: tuple[tuple[str, str | None, str | None], ...]

    @property
    def found(self) -> bool:
        return bool(self.tensors or self.settings)


@dataclass(frozen=True)
class StateSearch:
    """Where two runs part, as far as their kept states tell.

    Attributes:
        steps: those of which both have a state.
        last_match: the last of these with equal states, None if none; first: how the next one differs.
    """

    verdict: Verdict
    reason: str
    steps: tuple[int, ...]
    last_match: int | None
    first: StateDifference | None


def search_states(reference: SavedRun, candidate: SavedRun) -> StateSearch:
    """Binary search over the steps of which both runs kept a state; both ends are looked at first."""
    steps = tuple(sorted(step for step in reference.checkpoints if candidate.holds(step)))
    if reference.ledger is not None:
        steps = tuple(sorted(step for step in candidate.checkpoints if reference.holds(step)))
    if not steps:
        return StateSearch(UNKNOWN, "the two runs kept no state of the same step", steps, None, None)

    def probe(place: int) -> Verdict:
        return DIVERGE if state_difference(reference, candidate, steps[place]).found else MATCH

    found = first_divergent(len(steps), probe)
    if found.verdict is UNKNOWN:
        return StateSearch(UNKNOWN, "a later state agrees where an earlier one differs", steps, None, None)
    if found.verdict is MATCH:
        return StateSearch(MATCH, f"the states of both runs agree after {_listed(steps)}", steps, steps[-1], None)
    before = None if found.last_match is None else steps[found.last_match]
    step = steps[found.first_diverge]
    reason = f"the states after step {step} differ, of steps 1 to {step}" if before is None else (
        f"the states after step {before} agree and those after step {step} differ: the runs part in step"
        + (f" {step}" if step == before + 1 else f"s {before + 1} to {step}")
    )  # fmt: skip
    return StateSearch(DIVERGE, reason, steps, before, state_difference(reference, candidate, step))


def state_difference(reference: SavedRun, candidate: SavedRun, step: int) -> StateDifference:
    """What differs between the two states of `step`, among what both kept."""
    ours, theirs = reference.state(step), candidate.state(step)
    mixed = ours.unnamed_optimizer != theirs.unnamed_optimizer
    tensors = _unlike(ours.tensors[STATE_DICT], theirs.tensors[STATE_DICT], shared_only=mixed)
    one, other = ours.tensors[OPTIMIZER], theirs.tensors[OPTIMIZER]
    if not mixed:
        tensors += _unlike(one, other)
    elif one and other and sorted(one.values()) != sorted(other.values()):
        tensors += [("optimizer (its tensors have no names in a checkpoint)", None, None)]
    settings = [] if mixed else _unlike(ours.settings, theirs.settings)
    return StateDifference(step, tuple(tensors), tuple(settings))


def _unlike(
    ours: Mapping[str, str], theirs: Mapping[str, str], *, shared_only: bool = False
) -> list[tuple[str, str | None, str | None]]:
    names = ours.keys() & theirs.keys() if shared_only else ours.keys() | theirs.keys()
    return [(name, ours.get(name), theirs.get(name)) for name in sorted(names) if ours.get(name) != theirs.get(name)]


def _listed(steps: tuple[int, ...]) -> str:
    return (
        f"step{'s' if len(steps) > 1 else ''} " + ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    )
