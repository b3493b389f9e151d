"""bisect --replay: runs the reference again up to the divergence and looks for one flipped bit."""

from __future__ import annotations

from dataclasses import dataclass

from det_lightning.bisection.flipped_bit import FlippedBit, flipped_bit
from det_lightning.cli.printing import progress_bar, say, say_table, visible
from det_lightning.ledger.compare import Difference
from det_lightning.ledger.reader import LedgerReader


@dataclass(frozen=True)
class FlipReport:
    """tensor: the one weight that differs, if one does. flip: its flipped bit, if one bit explains its
    digests.

    reason: why there is no flip, else empty.
    """

    tensor: str | None
    flip: FlippedBit | None
    reason: str


def report_flip(reference: LedgerReader, difference: Difference, *, entry: str | None) -> FlipReport:
    """Replay the reference to the step of `difference`; the replay needs the run's own code, torch and
    lightning.
    """
    if "weights" in difference.kinds_without_leaves:
        return FlipReport(
            None,
            None,
            f"the leaves of step {difference.step} were not kept, so a flipped bit of a weight cannot be named",
        )
    weights = [each for each in difference.tensors if each.kind == "weights"]
    if len(weights) != 1:
        counted = f"{len(weights)} weights differ" if weights else "no single weight is known to differ"
        return FlipReport(None, None, f"{counted}, so no single flipped bit of a weight explains the step")
    tensor = weights[0]
    if tensor.reference is None or tensor.candidate is None:
        return FlipReport(tensor.name, None, f"only one run has a weight {visible(tensor.name)}")
    from det_lightning.replay import tensors_at

    arrays = tensors_at(reference.path, difference.step, kind="weights", entry=entry)
    if tensor.name not in arrays:
        return FlipReport(tensor.name, None, f"the replayed run has no weight {visible(tensor.name)}")
    with progress_bar("trying every bit") as progress:
        flip = flipped_bit(
            arrays[tensor.name],
            bytes.fromhex(tensor.reference),
            bytes.fromhex(tensor.candidate),
            progress=progress,
        )
    reason = "" if flip else f"no single flipped bit explains the two digests of {visible(tensor.name)}"
    return FlipReport(tensor.name, flip, reason)


def say_flip(report: FlipReport) -> None:
    if report.flip is None:
        say(f"replay: {report.reason}")
        return
    flip = report.flip
    index = ", ".join(map(str, flip.index))
    say(f"replay: one flipped bit explains it: {visible(report.tensor)}[{index}], bit {flip.bit}")
    distance = "" if flip.ulps is None else f"{flip.ulps} ulps apart"
    say_table(
        [
            ["reference", f"0x{flip.reference_bits}", flip.reference, flip.dtype],
            ["candidate", f"0x{flip.candidate_bits}", flip.candidate, distance],
        ]
    )
