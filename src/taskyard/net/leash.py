"""A process that must not outlive the one that started it: its stdin is a pipe from there.

The kernel closes the other end when that process ends, however it ends. What arrives is passed
over; only the end counts.
"""

import os
import select
from typing import Final

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
