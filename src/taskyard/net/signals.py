"""Signals as something to read, so that a loop meets them where it waits and nowhere else.

Python runs a handler between any two instructions, where half a turn is done. Here the handlers do
nothing; the interpreter writes each signal's number to a pipe, and the loop asks what was taken.
"""

import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Self

from taskyard.net.waker import open_pipe, read_pipe

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
