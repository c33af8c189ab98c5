"""When brokers started and stopped on a state directory: the file `starts`.

A line for each start and each orderly stop, so a start without a stop before it follows a kill or a
crash. Then a line before it has the time of the last record in the journal: the broker ended after
that. Reports and pages mark them in charts. The broker itself never reads the file to decide
something, and nothing is lost without it.
"""

import logging
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from taskyard.journal.files import read_json, replace_private

FILE_NAME: Final = "starts"

#: Lines that are kept: 500 restarts, in about 30 kB.
LINES_MAX: Final = 1000

logger = logging.getLogger("taskyard.journal")


class Word(StrEnum):
    """The kinds of lines."""

    STARTED = "started"
    STOPPED = "stopped"
    #: The last record before a start that follows a kill.
    RECORDED = "recorded"


class Start(Struct, frozen=True):
    """A start of a broker after an earlier one."""

    time_ns: int
    #: When the earlier one stopped in order. None: it was killed, or it crashed.
    stopped_ns: int | None = None
    #: After a kill, when the last record was written. The broker ended at some time between. None:
    #: unknown.
    recorded_ns: int | None = None

    @property
    def since_ns(self) -> int:
        """Return when nothing was recorded any more: the stop or the last record, if known."""
        return self.stopped_ns or self.recorded_ns or self.time_ns


def note(state: Path, word: Word, time_ns: int, recorded_ns: int = 0) -> None:
    """Add a line. An error is logged, and the broker goes on without the line.

    `recorded_ns` is the time of the last record before a start. 0: unknown.
    """
    lines = _lines(state)
    was_killed = word is Word.STARTED and lines and lines[-1][1] is not Word.STOPPED
    if was_killed and lines[-1][0] <= recorded_ns <= time_ns:
        lines.append((recorded_ns, Word.RECORDED))
    lines.append((time_ns, word))
    try:
        replace_private(state / FILE_NAME, msgspec.json.encode(lines[-LINES_MAX:]))
    except OSError as error:
        logger.warning("%s: not written: %s", state / FILE_NAME, error)


def read(state: Path) -> list[Start]:
    """Return the restarts of a broker. Empty if there is no readable file."""
    found = []
    for (before_ns, before), (time_ns, word) in pairwise(_lines(state)):
        if word is Word.STARTED:
            stopped_ns = before_ns if before is Word.STOPPED else None
            recorded_ns = before_ns if before is Word.RECORDED else None
            found.append(Start(time_ns, stopped_ns, recorded_ns))
    return found


def _lines(state: Path) -> list[tuple[int, Word]]:
    return read_json(state / FILE_NAME, list[tuple[int, Word]]) or []
