"""A file that only grows, by whole pieces: each piece is one os.write, and a piece that fails leaves no
trace.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from det_lightning.errors import LedgerError

_locked: weakref.WeakSet[AppendFile] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child, such as a worker that loads data, has no part in the lock: it may outlive a parent that was killed."""
    for file in list(_locked):
        file.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class AppendFile:
    """`path` opened for appending at `size` bytes (its size now, if None); what lies beyond is cut off.

    locked: nobody else may open it so until this file is closed, or its process ends. absent: a path where nothing may
    lie. A symbolic link is not followed: it could lead to a file that is no ledger's.

    Raises LedgerError if the file cannot be opened or written, or if another process changed its size in
    between.
    """

    def __init__(self, path: Path, *, size: int | None = None, locked: bool = False, absent: Path | None = None):
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            link = "; it is a symbolic link, which is not followed" if error.errno == errno.ELOOP else ""
            raise LedgerError(f"{path} cannot be opened for writing: {error.strerror}{link}") from None
        try:
            if locked:
                self._lock()
            if absent is not None and os.path.lexists(absent):
                raise LedgerError(f"{absent} was written by another process in this moment; choose another directory")
            if size is not None:
                os.ftruncate(self._descriptor, size)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            self.close()
            raise LedgerError(f"{path} cannot be opened for writing: {error.strerror}") from None
        except LedgerError:
            self.close()
            raise

    def _lock(self) -> None:
        """Where the file system has no locks, two writers are still noticed by the size they find."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locked.add(self)
        except BlockingIOError:
            raise LedgerError(
                f"{self.path} is being written by another process, or by another callback of this one; give every run a "
                f"directory of its own"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise

    def append(self, data: bytes) -> int:
        """Write `data` at the end, handed to the operating system when this returns, and return the offset it
        lies at.
        """
        try:
            found = os.fstat(self._descriptor).st_size
            if found != self.size:
                raise LedgerError(
                    f"{self.path} has {found} bytes where this run left {self.size}: another process writes "
                    "the same ledger; "
                    "give every run a directory of its own"
                )
            written = os.write(self._descriptor, data) if data else 0
            if written != len(data):
                raise OSError(0, f"only {written} of {len(data)} bytes were taken (is the disk full?)")
        except OSError as error:
            self.cut(self.size)
            raise LedgerError(f"{self.path} cannot be written: {error.strerror}") from None
        self.size += len(data)
        return self.size - len(data)

    def cut(self, size: int) -> None:
        """Take back what was appended beyond `size` bytes."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be cut back to {size} bytes: {error.strerror}") from None
        self.size = size

    def take_back(self, size: int) -> None:
        """As `cut`, unless another process has written since: what it wrote is not ours to take."""
        if os.fstat(self._descriptor).st_size == self.size:
            self.cut(size)

    def flush_to_disk(self) -> None:
        """Wait until what was appended would survive a loss of power."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be flushed to disk: {error.strerror}") from None

    def close(self) -> None:
        """A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
