"""The lock of a state directory: one process writes, others get an error with its process id.

The kernel releases the lock when its holder ends for any reason. A child must not inherit it: an
exec closes the file, and a hook closes it after a plain fork.
"""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Self

from taskyard.errors import StateLocked, UnusableFile
from taskyard.journal import witness
from taskyard.journal.files import check_owner, make_private_directory, open_regular

FILE_NAME = "lock"

#: Enough for any process id. A longer file was written by something else.
_PID_BYTES_MAX = 20

#: A command that looks whether a broker is running holds the lock for a moment. It is free by then.
_LOOK_SECONDS_MAX = 0.2
_RETRY_SECONDS = 0.01

_held: list[int] = []


def _close_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise share the locks."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class StateLock:
    """An exclusive lock, held until `release`. Creates a missing state directory.

    Raises UnknownFormat, before anything is created, if the state is of another version.
    """

    def __init__(self, directory: Path) -> None:
        witness.check_format(directory)
        try:
            make_private_directory(directory)
            check_owner(directory)
            self._descriptor: int | None = _open(directory)
        except OSError as error:
            raise UnusableFile(
                f"state directory {directory}: {error.strerror} "
                "(use a directory that you may write)"
            ) from error

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor in _held:
            _held.remove(descriptor)
            # Unlock explicitly: a child between fork and exec still has the file open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def open_file(path: Path) -> int:
    """Open an existing lock file to test whether it is locked, even on a read-only disk."""
    try:
        return open_regular(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return open_regular(path, os.O_RDONLY)


def _open(directory: Path) -> int:
    """Open and lock the file, or close it and raise."""
    descriptor = open_regular(directory / FILE_NAME, os.O_RDWR | os.O_CREAT)
    try:
        _take(descriptor, directory)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    _held.append(descriptor)
    return descriptor


def _take(descriptor: int, directory: Path) -> None:
    ends = time.monotonic() + _LOOK_SECONDS_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= ends:
                raise StateLocked(
                    f"state directory {directory}: in use by {_holder(descriptor)} "
                    "(stop it, or use another --state)"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _holder(descriptor: int) -> str:
    """Describe the holder. It may not have written its process id yet."""
    written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
    return f"process {int(written)}" if written.isdigit() else "another process"
