"""Descriptors that wake or end a loop: signals, other threads, the parent process, the terminal.

Python runs a signal handler between any two instructions, even in the middle of a turn. Here the
handlers do nothing. The interpreter writes each signal's number to a pipe, and the loop reads the
pipe where it polls. Knows no ZeroMQ.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Final, Self

#: The signals that end a process.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Catch signals in a `with` block and restore the old handlers after it. Main thread only."""

    def __init__(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = tuple(signals)
        self._handlers_before: dict[signal.Signals, signal._HANDLER] = {}
        self._wakeup_before = -1
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = open_pipe()
        try:
            # The pipe holds 65,536 signals. Beyond that, the ones in it still wake the loop.
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
        """Return a descriptor that is readable after a signal, until `received` is called."""
        return self._reader

    def received(self) -> list[int]:
        """Return the signals since the last call, in order."""
        return [number for number in read_pipe(self._reader) if number in self._signals]

    def _close_pipe(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Without a handler, the interpreter does not write to the pipe."""


#: More than a pipe holds, so that one read empties it.
PIPE_BYTES_MAX: Final = 1 << 20


def open_pipe() -> tuple[int, int]:
    """Open a pipe with both ends non-blocking. Return its reader and its writer."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return reader, writer


def read_pipe(reader: int) -> bytes:
    """Read everything that is in a pipe."""
    try:
        return os.read(reader, PIPE_BYTES_MAX)
    except BlockingIOError:
        return b""


class Waker:
    """Wake a loop from another thread.

    Any thread may call `wake`. The loop polls `fileno` and calls `clear` before it looks for work:
    an event between the two causes one wake too many, never one too few. A pipe works on every
    system, unlike an eventfd. Close it when no thread calls `wake` any more.
    """

    def __init__(self) -> None:
        self._reader, self._writer = open_pipe()

    def wake(self) -> None:
        """Make `fileno` readable until the next `clear`."""
        # A full pipe is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        read_pipe(self._reader)

    def fileno(self) -> int:
        return self._reader

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


#: Read at once. The parent is expected to write nothing.
_READ_BYTES: Final = 4096


class ParentPipe:
    """A pipe, usually stdin, that the parent process holds open while it lives.

    The kernel closes it when the parent ends, for whatever reason. Its content is ignored.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor to poll. Call `is_closed` when it is readable."""
        return self._descriptor

    def is_closed(self) -> bool:
        """Return whether the parent has closed its end."""
        if not self._poll.poll(0):
            return False
        try:
            return not os.read(self._descriptor, _READ_BYTES)
        except OSError:  # there is no stdin
            return True


#: stdin, stdout, stderr.
_STANDARD_FILES: Final = (0, 1, 2)


class Terminal:
    """The terminal that the process was started at, if any. Create it at startup.

    SIGHUP means "reload the settings" or "the terminal is gone". `is_gone` distinguishes them.
    """

    def __init__(self) -> None:
        self._was_there = _has_terminal()

    def is_gone(self) -> bool:
        return self._was_there and not _has_terminal()


def _has_terminal() -> bool:
    return any(map(os.isatty, _STANDARD_FILES))
