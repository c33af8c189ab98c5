"""The terminal that a process was started at, if it was.

SIGHUP says one of two things: somebody sent it to have the settings read again, or the terminal is
gone and nobody will see any more what is said. Here they are told apart.
"""

import os
from typing import Final

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
