"""The command line: commands, options, output and exit codes.

The top layer. It may import every package, and no package imports it. A command is imported when it
runs (`commands.py` is the table), so `taskyard --help` stays fast.
"""

import os

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main"]


def main(arguments: "Sequence[str] | None" = None) -> "NoReturn":
    """Run the command line and exit."""
    try:
        from taskyard.cli import interrupts  # noqa: PLC0415  # an interrupt of it is caught

        interrupts.end_on_interrupts()
        from taskyard.cli import entry  # noqa: PLC0415
    except KeyboardInterrupt:
        os._exit(130)
    entry.main(arguments)
