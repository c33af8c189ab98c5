"""The lock of a state directory: one process writes it, the next one is told who does.

The kernel frees it when its holder ends, however it ends. It must not outlive the holder in a
child: an exec closes it, and a plain fork is made to.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from taskyard.errors import JournalFailed, StateLocked
from taskyard.journal.files import PRIVATE_FILE, make_private_directory

FILE_NAME = "lock"

#: Enough for any process id; more than that was not written by us.
_PID_BYTES_MAX = 20

_held: list[int] = []


def _forget_in_child() -> None:
    """A forked child shares the lock for as long as it has the file open: close it there."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_in_child)


class StateLock:
    """Held from construction to `release`; makes the state directory if there is none."""

    def __init__(self, directory: Path) -> None:
        try:
            make_private_directory(directory)
            self._descriptor: int | None = _open(directory)
        except OSError as error:
            raise JournalFailed(
                f"can't use {directory} as state directory: {error.strerror}; "
                "see that it is a directory that you may write, or give another --state"
            ) from error

    def release(self) -> None:
        """Free the lock; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor in _held:
            _held.remove(descriptor)
            # Freed by word, not by closing alone: a child on its way to its exec still has it open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open(directory: Path) -> int:
    descriptor = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        _take(descriptor, directory)
    except BaseException:
        os.close(descriptor)
        raise
    _held.append(descriptor)
    return descriptor


def _take(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StateLocked(
            f"state directory {directory} is in use by {_holder(descriptor)}; "
            "stop it, or give another --state"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)


def _holder(descriptor: int) -> str:
    """Who wrote itself into the file; it may not have come to that yet."""
    written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
    return f"process {int(written)}" if written.isdigit() else "another process"
