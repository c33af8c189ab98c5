"""Signals as something to read, so that a loop meets them where it waits and nowhere else.

Python runs a handler between any two instructions, where half a turn is done. Here the handlers do
nothing; the interpreter writes each signal's number to a pipe, and the loop asks what was taken.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Final, Self

#: What asks a process to end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Takes the given signals while entered, and gives them back as they were. Main thread only."""

    def __init__(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = tuple(signals)
        self._handlers_before: dict[signal.Signals, signal._HANDLER] = {}
        self._wakeup_before = -1
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = open_pipe()
        try:
            # The pipe takes 65,536 signals before it is full; whoever sends more is heard anyway.
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        except BaseException:
            self._close_pipe()
            raise
        for number in self._signals:
            self._handlers_before[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._handlers_before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        self._close_pipe()

    def fileno(self) -> int:
        """Readable when a signal came since the last `received`."""
        return self._reader

    def received(self) -> list[int]:
        """The signals since the last call, in their order."""
        return [number for number in read_pipe(self._reader) if number in self._signals]

    def _close_pipe(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """There must be a handler, or the interpreter would not write the number to the pipe."""


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


#: What is read at once; nobody should write anything.
_READ_BYTES: Final = 4096


class ParentPipe:
    """Watches a descriptor for its end."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._look = select.poll()
        self._look.register(descriptor, select.POLLIN)

    def fileno(self) -> int:
        """Readable when there is something to look at."""
        return self._descriptor

    def is_closed(self) -> bool:
        """Nobody holds the other end any more."""
        if not self._look.poll(0):
            return False
        try:
            return not os.read(self._descriptor, _READ_BYTES)
        except OSError:  # there is no stdin, so nobody who holds it
            return True


#: stdin, stdout, stderr.
_USUAL_FILES: Final = (0, 1, 2)


class Terminal:
    """To be made at the start."""

    def __init__(self) -> None:
        self._was_there = _is_there()

    def is_gone(self) -> bool:
        return self._was_there and not _is_there()


def _is_there() -> bool:
    return any(map(os.isatty, _USUAL_FILES))
