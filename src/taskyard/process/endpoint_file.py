"""The file in a state directory with the endpoints at which its broker really listens.

Written by a broker with listeners beside its native socket, and removed at its end. It counts only
while a process holds the lock of the state: a killed broker leaves it. Holds no secret.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.journal.files import read_json, replace_private
from taskyard.process.locks import LOCK_FILE, lock_holder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger("taskyard.broker")

FILE_NAME: Final = "endpoints.json"


class OpenListener(Struct, frozen=True):
    """A listener of a running broker."""

    dialect: str
    #: With their real ports. For ping-pong the backend and the frontend.
    endpoints: tuple[str, ...]
    #: The address of the broker for round-robin peers. Empty: its endpoint.
    identity: str = ""


@contextmanager
def listed(state: Path, listeners: Sequence[OpenListener]) -> Iterator[None]:
    """List the listeners in the file during the `with` block. A failure is logged."""
    path = state / FILE_NAME
    try:
        path.unlink(missing_ok=True)
        if listeners:
            replace_private(path, msgspec.json.encode(listeners))
    except OSError as error:
        logger.warning("%s: can't write: %s", path, error.strerror)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def open_listeners(state: Path) -> list[OpenListener]:
    """Return the listeners of the running broker. Empty: none runs, or it has none."""
    found = read_json(state / FILE_NAME, list[OpenListener])
    return found if found and lock_holder(state / LOCK_FILE) is not None else []
