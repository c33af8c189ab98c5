"""Ctrl-C while a command is imported, which takes up to a second: the process ends at once.

An exception would print the traceback of an import. Imports nothing that takes time.
"""

import os
import signal

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from typing import NoReturn

#: `ExitCode.INTERRUPTED`, which is not imported yet.
INTERRUPTED = 130


def end_on_interrupts() -> None:
    """Let Ctrl-C end the process without a line, unless it is ignored or handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_signal: object) -> "NoReturn":
    os._exit(INTERRUPTED)
