"""The files in a state directory that name the listeners of its broker, or the leader of a standby.

A broker with listeners beside its native socket writes the endpoints at which it really listens. A
standby answers no peer before it leads, so commands that look for a broker there name the leader.
Files count only while a process holds the lock of the state: a killed process leaves its file. They
hold no secrets.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from msgspec import Struct

from taskyard.journal.files import read_json, replace_private
from taskyard.process.locks import LOCK_FILE, lock_holder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger("taskyard.broker")

ENDPOINT_FILE: Final = "endpoints.json"
STANDBY_FILE: Final = "standby.json"

_T = TypeVar("_T")


class OpenListener(Struct, frozen=True):
    """A listener of a running broker."""

    dialect: str
    #: With their real ports. For ping-pong the backend and the frontend.
    endpoints: tuple[str, ...]
    #: The address of the broker for round-robin peers. Empty: its endpoint.
    identity: str = ""


class Standby(Struct, frozen=True):
    """A standby, and the leader that it follows."""

    #: Of the leader.
    epoch: int
    host: str = ""
    endpoints: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" on {self.host}" if self.host else ""
        places = f" at {', '.join(self.endpoints)}" if self.endpoints else ""
        return f"a standby that follows the broker of epoch {self.epoch}{at}{places}"


@contextmanager
def listed(state: Path, listeners: Sequence[OpenListener]) -> Iterator[None]:
    """List the listeners in their file during the `with` block. A failure is logged."""
    _remove(state / ENDPOINT_FILE)
    if listeners:
        _write(state / ENDPOINT_FILE, listeners)
    try:
        yield
    finally:
        _remove(state / ENDPOINT_FILE)


def open_listeners(state: Path) -> list[OpenListener]:
    """Return the listeners of the running broker. Empty: none runs, or it has none."""
    return _of_running(state, ENDPOINT_FILE, list[OpenListener]) or []


def write_standby(state: Path, standby: Standby) -> None:
    """Write the file of a standby. A failure is logged."""
    _write(state / STANDBY_FILE, standby)


def remove_standby(state: Path) -> None:
    """Remove the file of a standby, if it is there. A failure is logged."""
    _remove(state / STANDBY_FILE)


def running_standby(state: Path) -> Standby | None:
    """Return the standby that runs on a state directory. None: there is none."""
    return _of_running(state, STANDBY_FILE, Standby)


def _write(path: Path, content: object) -> None:
    try:
        replace_private(path, msgspec.json.encode(content))
    except OSError as error:
        logger.warning("%s: can't write: %s", path, error.strerror)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: can't remove: %s", path, error.strerror)


def _of_running(state: Path, name: str, kind: type[_T]) -> _T | None:
    """Return the content of a file, if its process runs."""
    found = read_json(state / name, kind)
    with suppress(OSError):
        return found if found and lock_holder(state / LOCK_FILE) is not None else None
    return None
