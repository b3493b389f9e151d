"""A drill: one bit is flipped at a secret place, and the two ledgers tell step, tensor, index and bit."""

from pathlib import Path

import numpy as np
from rich.console import Console

from det_lightning.bisection.bit_flip import digest_delta, find_flipped_bit, words_of
from det_lightning.bisection.ledgers import compare_ledgers
from det_lightning.demo.runs import RunPlan, RunResult, train
from det_lightning.demo.secret import open_seal, seal_hash
from det_lightning.ledger.store import LedgerReader
from det_lightning.replay import tensors_at
from det_lightning.replay.group import Group


def find_planted_fault(group: Group, scratch: Path, out: Console) -> tuple[RunResult, bool]:
    """Records a clean and a faulty run, finds the fault from their ledgers alone, then opens the seal.

    Returns:
        (the clean run, whether what was found is what was drawn).
    """
    seal = scratch / "seal.json"
    clean = group.run(train, 1, RunPlan("det", 1, 1, ledger=scratch / "clean"))
    faulty = group.run(train, 1, RunPlan("det", 1, 1, ledger=scratch / "faulty", sealed_fault=seal))
    out.print("one bit of one weight was flipped after one of the steps; the place is sealed:")
    out.print(f"  SHA-256 of the seal  {seal_hash(seal)}")
    out.print(f"  clean run            {clean.digest}")
    out.print(f"  faulty run           {faulty.digest}")
    found = _find(scratch)
    out.print(f"bisect, from the two ledgers and a replay of the clean run:\n  {_told(found)}")
    secret = open_seal(seal)
    drawn = (secret.step, secret.parameter, secret.index, secret.bit)
    out.print(f"the seal, opened (SHA-256 {seal_hash(seal)}):\n  {_told(drawn)}")
    out.print("found" if found == drawn else "NOT FOUND: what bisect names is not what was drawn")
    return clean, found == drawn


def _find(scratch: Path) -> tuple[int, str, int, int] | None:
    with LedgerReader(scratch / "clean") as reference, LedgerReader(scratch / "faulty") as candidate:
        first = compare_ledgers(reference, candidate).first
    tensors = [each for each in first.tensors if each.kind == "weights"] if first is not None else []
    if len(tensors) != 1:
        return None
    (tensor,) = tensors
    weights: np.ndarray = tensors_at(scratch / "clean", first.step)[tensor.name]
    delta = digest_delta(bytes.fromhex(tensor.reference), bytes.fromhex(tensor.candidate))
    place = find_flipped_bit(words_of(weights), delta)
    return None if place is None else (first.step, tensor.name, *place)


def _told(place: tuple[int, str, int, int] | None) -> str:
    if place is None:
        return "no single flipped bit explains the ledgers"
    step, name, index, bit = place
    return f"step {step}, tensor {name}, element {index}, bit {bit}"
