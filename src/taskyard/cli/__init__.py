"""The command line: commands, options, output and exit codes.

The top layer. It may import every package, and no package imports it. A command is imported when it
runs (`commands.py` is the table), so `taskyard --help` stays fast.
"""

import os
import signal

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main"]

#: `ExitCode.INTERRUPTED`, which is not imported yet.
INTERRUPTED = 130


def main(arguments: "Sequence[str] | None" = None) -> "NoReturn":
    """Run the command line and exit."""
    try:
        end_on_interrupts()
        from taskyard.cli import entry  # noqa: PLC0415
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    entry.main(arguments)


# Ctrl-C while a command is imported, which takes up to a second. The process ends at once: an
# exception would print the traceback of an import.


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
