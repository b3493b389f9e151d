"""How the code of two runs is found: options that are given once for both sides, or twice, for A and then B."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from det_lightning.ledger.reader import LedgerReader


@dataclass(frozen=True)
class SideOptions:
    """entry, python, cwd: one value for each side, None for the recorded or the present one.

    checkpoint: what each side's replay starts from, None for the nearest that its ledger noted.
    """

    entry: tuple[str | None, str | None]
    python: tuple[str | None, str | None]
    cwd: tuple[str | None, str | None]
    world: int | None
    accumulate: int | None
    checkpoint: tuple[Path | None, Path | None] = (None, None)

    @classmethod
    def of(
        cls,
        *,
        entry: Sequence[str] | None,
        python: Sequence[str] | None,
        cwd: Sequence[str] | None,
        world: int | None,
        accumulate: int | None,
    ) -> SideOptions:
        """From what the command line gave. Raises typer.BadParameter, which is misuse."""
        sides = {name: _twice(name, given) for name, given in (("entry", entry), ("python", python), ("cwd", cwd))}
        for folder in sides["cwd"]:
            if folder is not None and not Path(folder).is_dir():
                raise typer.BadParameter(f"--cwd {folder} is not a directory")
        return cls(**sides, world=world, accumulate=accumulate)

    def starting_from(self, checkpoint: tuple[Path | None, Path | None]) -> SideOptions:
        return replace(self, checkpoint=checkpoint)

    def search(self, reference: LedgerReader, candidate: LedgerReader, step: int) -> Any:
        """Replays the step on both sides; answers a StepFinding. Needs the runs' own code, torch and lightning."""
        from det_lightning.replay.sides import Side
        from det_lightning.replay.step_search import search_step

        sides = [
            Side(reader.path, entry, python, None if cwd is None else Path(cwd), checkpoint)
            for reader, entry, python, cwd, checkpoint in zip(
                (reference, candidate), self.entry, self.python, self.cwd, self.checkpoint, strict=True
            )
        ]
        recorded = candidate.environment
        world = self.world or recorded.get("world_size")
        accumulate = self.accumulate or (None if self.world else recorded.get("accumulate"))
        return search_step(*sides, step, world=world, accumulate=accumulate, progress=_tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _twice(name: str, given: Sequence[str] | None) -> tuple[str | None, str | None]:
    if not given:
        return None, None
    if len(given) > 2:
        raise typer.BadParameter(f"--{name} is given once for both sides, or twice: for A and then for B")
    return given[0], given[-1]
