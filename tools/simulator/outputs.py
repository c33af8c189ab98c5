"""The output of simulated programs, and the check that the broker keeps all of it.

The output of an attempt follows from its name, so that checkers need no memory of it. Draws no
random numbers: schedules without output stay as they are.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from simulator.models import Violation
from taskyard.broker.output_store import OutputMemory
from taskyard.core import records as r
from taskyard.core.identity import spelling
from taskyard.core.output import Stream
from taskyard.journal.recovery import stream_in

#: One schedule in so many has programs that print.
_SCHEDULES: Final = 10
_PRINTING: Final = 8

#: Bytes that programs print: nothing, a short stream, or a long one.
_SIZES: Final = (0, 100, 20_000, 60_000)


def prints_output(seed: int) -> bool:
    """Return whether programs of a schedule print."""
    return seed % _SCHEDULES == _PRINTING


def output_of(name: bytes, attempt: int) -> bytes:
    """Return what an attempt prints."""
    line = b"attempt %d of %s\n" % (attempt, name)
    size = _SIZES[crc32(line) % len(_SIZES)]
    return (line * (size // len(line) + 1))[:size]


class OutputChecker:
    """Compares the output in journal and files with what was printed."""

    def __init__(self) -> None:
        #: The broker's files, which survive its crashes.
        self.files = OutputMemory()

    def on_durable(self, record: r.AnyRecord) -> None:
        if not isinstance(record, r.Progressed) or record.stderrs is None:
            return
        for index, (name, attempt) in enumerate(zip(record.names, record.attempts, strict=True)):
            kept, printed = stream_in(record, index, Stream.STDERR), output_of(name, attempt)
            found = self._in_file(name, attempt) if kept.in_file else kept.text
            if found != printed:
                text = f"{name!r}, attempt {attempt}: printed {len(printed)} bytes"
                raise Violation("output", f"{text}, and {len(found)} are kept")

    def _in_file(self, name: bytes, attempt: int) -> bytes:
        for key, data in self.files.streams.items():
            if (spelling(key.campaign, key.name), key.attempt) == (name, attempt):
                return bytes(data)
        return b""
