"""The lock of a state directory: one process writes it, the next one is told who does.

The kernel frees it when its holder ends, however it ends. It must not outlive the holder in a
child: an exec closes it, and a plain fork is made to.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from taskyard.errors import JournalFailed, StateLocked
from taskyard.journal.files import check_owner, make_private_directory, open_regular

FILE_NAME = "lock"

#: Enough for any process id; more than that was not written by us.
_PID_BYTES_MAX = 20

_held: list[int] = []


def _close_in_child() -> None:
    """A forked child shares the lock for as long as it has the file open: close it there."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class StateLock:
    """Held from construction to `release`; makes the state directory if there is none."""

    def __init__(self, directory: Path) -> None:
        try:
            make_private_directory(directory)
            check_owner(directory)
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


class ReadLock(StateLock):
    """Keeps brokers out of a state directory while it is read, also where nothing can be written.

    Where there is no lock file and none can be made, no broker can run either, and nothing is held.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = None
        try:
            descriptor = _open_read_only(directory)
        except OSError as error:
            raise JournalFailed(
                f"can't read state directory {directory}: {error.strerror}; "
                "see that it is a directory that you may read, or give another --state"
            ) from error
        if descriptor is not None:
            self._descriptor = _keep(descriptor, directory)
            with contextlib.suppress(OSError):  # a full or read-only disk
                _write_holder(descriptor)


def open_file(path: Path) -> int:
    """Open a lock file that is there, to see whether it is held: also on a read-only disk."""
    try:
        return open_regular(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return open_regular(path, os.O_RDONLY)


def _open_read_only(directory: Path) -> int | None:
    path = directory / FILE_NAME
    try:
        return open_file(path)
    except FileNotFoundError:
        # A file of root's would keep its owner out of a state directory of another user.
        if directory.stat().st_uid != os.geteuid():
            return None
    with contextlib.suppress(OSError):
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    return None


def _open(directory: Path) -> int:
    descriptor = open_regular(directory / FILE_NAME, os.O_RDWR | os.O_CREAT)
    _keep(descriptor, directory)
    try:
        _write_holder(descriptor)
    except BaseException:
        _held.remove(descriptor)
        os.close(descriptor)
        raise
    return descriptor


def _keep(descriptor: int, directory: Path) -> int:
    """Lock the file, or close it and raise."""
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


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)


def _holder(descriptor: int) -> str:
    """Who wrote itself into the file; it may not have come to that yet."""
    written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
    return f"process {int(written)}" if written.isdigit() else "another process"
