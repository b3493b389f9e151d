"""The errors that det-lightning raises; each says what was given, where, what is allowed and what to do."""


class DetError(Exception):
    """Base of every error raised on purpose by this package."""

    def __init__(self, message: str):
        super().__init__(message)


class InputError(DetError, ValueError):
    """An argument of an operation, a strategy or a command is outside what it accepts."""


class UncoveredError(DetError, RuntimeError):
    """A module or an operation has no arithmetic contract, so its bits could not be promised."""


class LostRankError(DetError):
    """Another rank is gone, or did not come: the cause is to be looked for there."""


class LedgerError(DetError, ValueError):
    """A directory or a file is not a sound ledger, or does not belong to the run at hand."""


class DivergenceError(DetError, RuntimeError):
    """A run has left the ledger that it was to follow. `step`: after which optimizer step."""

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class ReplicaError(DetError, RuntimeError):
    """The ranks' copies of the model differ. `step`: after which; `ranks`: rank -> names of its differing tensors."""

    def __init__(self, message: str, *, step: int, ranks: dict[int, tuple[str, ...]]):
        super().__init__(message)
        self.step, self.ranks = step, ranks


class FaultError(DetError, RuntimeError):
    """A result or a state is not what exact arithmetic says it is.

    `rank`, `step`, `layer`: where; `kind`: "product", "gradient digits", "digits in flight", "gradient" or "memory";
    `verdict`: "transient" or "persistent" where the work was done again, else None.
    """

    def __init__(self, message: str, *, rank: int, step: int, layer: str, kind: str, verdict: str | None):
        super().__init__(message)
        self.rank, self.step, self.layer, self.kind, self.verdict = rank, step, layer, kind, verdict
