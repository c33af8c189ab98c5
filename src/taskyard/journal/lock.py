"""The lock of a state directory, and the file `starts`: when its brokers started and stopped.

A single process writes, every other gets an error with its process id. The kernel releases the lock
when its holder ends for any reason. A child must not inherit it: an exec closes the file, and a
hook closes it after a plain fork.

`starts` has a line for each start and each orderly stop, so a start without a stop before it
follows a kill or a crash. Then a line before it has the time of the last record in the journal: the
broker ended after that. Reports and pages mark them in charts. The broker never reads the file to
decide something, and nothing is lost without it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import msgspec
from msgspec import Struct

from taskyard.errors import StateLocked, UnusableFile
from taskyard.journal.files import (
    check_owner,
    make_private_directory,
    open_regular,
    read_json,
    replace_private,
)

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
    """An exclusive lock, held until `release`. Creates a missing state directory."""

    def __init__(self, directory: Path) -> None:
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


STARTS_FILE: Final = "starts"

#: Lines that are kept: 500 restarts, in about 30 kB.
START_LINES_MAX: Final = 1000

logger = logging.getLogger("taskyard.journal")


class StartWord(StrEnum):
    """The kinds of lines."""

    STARTED = "started"
    STOPPED = "stopped"
    #: The last record before a start that follows a kill.
    RECORDED = "recorded"


class Start(Struct, frozen=True):
    """A start of a broker after an earlier one."""

    time_ns: int
    #: When the earlier broker stopped in order. None if it was killed, or crashed.
    stopped_ns: int | None = None
    #: After a kill, when the last record was written. The broker ended at some time between. None:
    #: unknown.
    recorded_ns: int | None = None

    @property
    def since_ns(self) -> int:
        """Return when nothing was recorded any more: the stop or the last record, if known."""
        return self.stopped_ns or self.recorded_ns or self.time_ns


def note_start(state: Path, word: StartWord, time_ns: int, recorded_ns: int = 0) -> None:
    """Add a line. An error is logged, and the broker goes on without the line.

    `recorded_ns` is the time of the last record before a start. 0: unknown.
    """
    lines = _start_lines(state)
    was_killed = word is StartWord.STARTED and lines and lines[-1][1] is not StartWord.STOPPED
    if was_killed and lines[-1][0] <= recorded_ns <= time_ns:
        lines.append((recorded_ns, StartWord.RECORDED))
    lines.append((time_ns, word))
    try:
        replace_private(state / STARTS_FILE, msgspec.json.encode(lines[-START_LINES_MAX:]))
    except OSError as error:
        logger.warning("%s: not written: %s", state / STARTS_FILE, error)


def read_starts(state: Path) -> list[Start]:
    """Return the restarts of a broker. Empty if there is no readable file."""
    found = []
    for (before_ns, before), (time_ns, word) in pairwise(_start_lines(state)):
        if word is StartWord.STARTED:
            stopped_ns = before_ns if before is StartWord.STOPPED else None
            recorded_ns = before_ns if before is StartWord.RECORDED else None
            found.append(Start(time_ns, stopped_ns, recorded_ns))
    return found


def _start_lines(state: Path) -> list[tuple[int, StartWord]]:
    return read_json(state / STARTS_FILE, list[tuple[int, StartWord]]) or []
