"""The lock files of a state directory: which process uses it, and which `up` runs on it.

A lock lasts as long as its process, and the file holds that process's id.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from taskyard.errors import StateLocked
from taskyard.journal import lock
from taskyard.journal.files import check_owner, make_private_directory, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Locked by the process that has the journal open.
LOCK_FILE: Final = lock.FILE_NAME

#: Locked by `taskyard up`.
UP_FILE: Final = "up.pid"

_PID_BYTES_MAX: Final = 20


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds a lock file; 0 if unreadable, None if it is free."""
    try:
        descriptor = lock.open_file(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
        return int(written) if written.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


@contextmanager
def hold_up_lock(state: Path) -> Iterator[None]:
    """Hold the lock of `taskyard up`. Raises `StateLocked` if another process holds it."""
    make_private_directory(state)
    check_owner(state)
    descriptor = open_regular(state / UP_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StateLocked(
            f"{state}: `taskyard up` is already running (stop it with `taskyard down --state "
            f"{state}`)"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        with suppress(OSError):
            (state / UP_FILE).unlink()
        os.close(descriptor)
