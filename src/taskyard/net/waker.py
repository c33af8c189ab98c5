"""Wakes a loop that waits, from another thread. Carries no content: only that there is something.

A pipe and not an eventfd: one way on every system, and no slower where it matters.
"""

import contextlib
import os
from typing import Final

#: More than a pipe holds, so one read empties it.
PIPE_BYTES_MAX: Final = 1 << 20


def open_pipe() -> tuple[int, int]:
    """A pipe that blocks at neither end: where to read, where to write."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def read_pipe(reader: int) -> bytes:
    """All that is in it."""
    try:
        return os.read(reader, PIPE_BYTES_MAX)
    except BlockingIOError:
        return b""


class Waker:
    """Any thread may `wake`; the loop polls `fileno` and calls `clear` before it looks for work.

    Cleared first, looked second: what comes between the two wakes once too often, never too seldom.
    Close it when nobody wakes any more.
    """

    def __init__(self) -> None:
        self._reader, self._writer = open_pipe()

    def wake(self) -> None:
        """However often before the next `clear`, it is once."""
        # A full pipe is as readable as it gets.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        read_pipe(self._reader)

    def fileno(self) -> int:
        return self._reader

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
