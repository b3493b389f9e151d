"""The operations of one optimizer step on one rank, as `bisect --replay` records them: a file of JSON lines.

Beside the operations proper there are entries that compute nothing: `state` (what the step begins and ends with),
`batch` (the samples as they reach the model) and `gradients` (after the reduction, before clipping).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from det_lightning.errors import LedgerError

STATE, BATCH, GRADIENTS = "state", "batch", "gradients"
# In place of a digest: the operation may still be under way; there is no plain memory to read.
PENDING, UNREAD = "pending", "unread"
NOT_READ = (PENDING, UNREAD)
PHASES = ("begin", "forward", "backward", "reduction", "update", "end")
MAX_LOG_BYTES = 1 << 31


@dataclass(frozen=True)
class Value:
    """A tensor that went into an operation or came out of it.

    digest: hex of its tensor digest; equal for equal dtype, shape and bits. storage: a number that tensors in the same
    memory share. name: of a weight, buffer, gradient, optimizer state or part of the batch, if it is one.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    storage: int
    name: str = ""


@dataclass(frozen=True)
class Operation:
    """One call, in the order of execution.

    index: place in the log. phase: one of PHASES. micro_batch: counted from 0 within the step. module: path of the
    module whose forward made the call, or made the call that this backward operation belongs to. node: the autograd
    node it runs in, else empty. forward: index of the operation it is the backward of. place: file, line and function
    of the user's code. arguments: what is no tensor, spelled out. samples: data set indices along dimension 0 of a
    batch, where they are known.
    """

    index: int
    phase: str
    micro_batch: int
    module: str
    name: str
    node: str
    forward: int | None
    place: str
    arguments: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    samples: tuple[int, ...] | None = None

    @property
    def identity(self) -> tuple:
        """What two calls share if they are the same place of the same program, whatever its modules are called and
        whatever data it is given."""
        shapes = () if self.name == BATCH else tuple((each.dtype, each.shape) for each in self.outputs)
        return self.phase, self.micro_batch, self.name, self.node, shapes


def write_line(operation: Operation) -> str:
    return json.dumps(asdict(operation), separators=(",", ":"), ensure_ascii=False) + "\n"


def read_log(path: Path) -> list[Operation]:
    """All operations of a log. Raises LedgerError if it is missing or is not one."""
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise LedgerError(f"{path} is larger than {MAX_LOG_BYTES} bytes; record a smaller step")
        with open(path, encoding="utf-8") as lines:
            return list(_operations(lines))
    except OSError as error:
        raise LedgerError(f"the operations {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerError(f"{path} is not a log of operations ({error})") from None


def _operations(lines: Iterable[str]) -> Iterable[Operation]:
    for line in lines:
        body = json.loads(line)
        body["inputs"] = tuple(_value(each) for each in body["inputs"])
        body["outputs"] = tuple(_value(each) for each in body["outputs"])
        body["arguments"] = tuple(body["arguments"])
        body["samples"] = None if body["samples"] is None else tuple(body["samples"])
        yield Operation(**body)


def _value(body: dict) -> Value:
    return Value(**(body | {"shape": tuple(body["shape"])}))
