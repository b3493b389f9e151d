"""The two ends of a ledger: LedgerWriter appends records, LedgerReader finds them."""

from det_lightning.ledger.reader import Checkpoint, LedgerReader, Resume
from det_lightning.ledger.writer import LedgerWriter

__all__ = ["Checkpoint", "LedgerReader", "LedgerWriter", "Resume"]
