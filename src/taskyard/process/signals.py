"""Signals of a process that supervises others: SIGTERM interrupts it, SIGHUP reloads settings."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from taskyard.net.signals import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM, as on Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reload_on_sighup(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` on SIGHUP. Raise `KeyboardInterrupt` instead if the terminal has closed."""
    terminal = Terminal()

    def on_sighup(number: int, frame: FrameType | None) -> None:
        if terminal.is_gone():
            _interrupt(number, frame)
        # In a thread: the interrupted code may hold the lock that `reload` takes.
        threading.Thread(target=reload, name="reload", daemon=True).start()

    before = signal.signal(signal.SIGHUP, on_sighup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
