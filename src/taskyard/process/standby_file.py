"""The file in the state directory of a standby, which answers no peer before it leads.

With it, commands that look for a broker there can name the leader. It counts only
while a process holds the lock of the state: a killed standby leaves it. Holds no secret.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.journal.files import read_json, replace_private
from taskyard.process.locks import LOCK_FILE, lock_holder

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("taskyard.broker")

FILE_NAME: Final = "standby.json"


class StandbyFile(Struct, frozen=True):
    """A standby, and the leader that it follows."""

    #: Of the leader.
    epoch: int
    host: str = ""
    endpoints: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" on {self.host}" if self.host else ""
        places = f" at {', '.join(self.endpoints)}" if self.endpoints else ""
        return f"a standby that follows the broker of epoch {self.epoch}{at}{places}"


def write(state: Path, content: StandbyFile) -> None:
    """Write the file. A failure is logged."""
    try:
        replace_private(state / FILE_NAME, msgspec.json.encode(content))
    except OSError as error:
        logger.warning("%s: can't write: %s", state / FILE_NAME, error.strerror)


def remove(state: Path) -> None:
    """Remove the file, if it is there."""
    with suppress(OSError):
        (state / FILE_NAME).unlink(missing_ok=True)


def running_standby(state: Path) -> StandbyFile | None:
    """Return the standby that runs on a state directory. None: there is none."""
    found = read_json(state / FILE_NAME, StandbyFile)
    return found if found and lock_holder(state / LOCK_FILE) is not None else None
