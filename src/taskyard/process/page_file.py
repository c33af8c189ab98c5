"""The file that names the running page of a state directory, for programs that link to it.

The owner of the page writes it and holds a lock on it: see `taskyard.web.address`. A killed owner
leaves the file, but not the lock. Knows no tokens.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from msgspec import MsgspecError, Struct, json

from taskyard.errors import TaskyardError
from taskyard.journal.files import open_regular
from taskyard.net.keys import read_private

if TYPE_CHECKING:
    from pathlib import Path

#: Private to the user, like the keys.
PAGE_FILE: Final = "page.json"


class _Address(Struct):
    """The part of the file that is no secret."""

    address: str


def page_address(state: Path) -> str | None:
    """Return the address of the running page without a token, as a link in reports and status."""
    content = read_page_file(state)
    try:
        return None if content is None else json.decode(content, type=_Address).address
    except MsgspecError:
        return None


def read_page_file(state: Path) -> bytes | None:
    """Return the file of the running page. None if there is none, or not for this user."""
    path = state / PAGE_FILE
    try:
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            if not is_owned(descriptor):
                return None
        finally:
            os.close(descriptor)
        return read_private(path)
    except (OSError, TaskyardError):
        return None


def is_owned(descriptor: int) -> bool:
    """Return whether an owner holds the lock. Readers share it, so they don't see each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
