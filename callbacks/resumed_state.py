"""Whether a run goes on with the state that its ledger recorded: a checkpoint may have been damaged, or be another one."""

from collections.abc import Mapping
from pathlib import Path

from det_lightning.callbacks.started_digests import StartedDigests

from det_lightning.ledger.reader import LedgerReader
from det_lightning.ledger.record import root

STATES = ("weights", "optimizer", "buffers")
"""The kinds that a checkpoint brings back."""


def unlike_record(path: Path, step: int, started: Mapping[str, StartedDigests]) -> list[str]:
    """Kind and name of each tensor whose digest is not the one in the record of `step`; of a kind without leaves there, the
    kind alone. Kinds that were not recorded there are not judged.

    Raises LedgerError if there is no such record.
    """
    unlike = []
    with LedgerReader(path) as reader:
        record = reader.record(step)
        for kind, digests in started.items():
            recorded, found = record.agree["roots"].get(kind), digests.result()
            if recorded is None or recorded == root(found):
                continue
            leaves, now = reader.leaves(record, kind), {name: each.hex() for name, each in found.items()}
            names = [name for name in sorted(leaves.keys() | now.keys()) if leaves.get(name) != now.get(name)]
            unlike += [f"{kind} {name}" for name in names] if leaves else [kind]
    return unlike
