"""The last term of a state directory, so that a restart after a kill need not wait for its lease.

A killed broker leaves its term in the row of `taskyard.leader`. A broker that gets the lock of the
same state directory has the proof that the process of that term is dead, and ends the term. The
proof holds only for the same lock: not on another machine, not after a reboot, and not for a copy
of the directory. Otherwise the file is ignored, and the broker waits.
"""

from pathlib import Path
from typing import Final

import msgspec

from taskyard.journal import lock
from taskyard.journal.files import read_json, replace_private
from taskyard.journal.postgres import database, leader
from taskyard.journal.postgres.leader import Term

FILE_NAME: Final = "term"

#: A random number of each boot. Without it there is no proof.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class _LastTerm(msgspec.Struct, frozen=True):
    epoch: int
    holder: str
    #: The lock: its boot, device and file number.
    boot: str
    device: int
    inode: int


def write(state: Path, term: Term) -> None:
    """Note the term of this process, which has the lock of `state`."""
    content = _LastTerm(term.epoch, term.holder, *_lock_of(state))
    replace_private(state / FILE_NAME, msgspec.json.encode(content))


def end(state: Path, url: str) -> bool:
    """End the term of the process that had the lock of `state` before this one.

    Return whether there was one. Changes nothing if another broker has taken over since.
    """
    found = read_json(state / FILE_NAME, _LastTerm)
    if found is None or not found.boot:
        return False
    if (found.boot, found.device, found.inode) != _lock_of(state):
        return False
    with database.open_database(url) as connection:
        database.check_tables(connection)
        return leader.release(connection, Term(found.epoch, found.holder))


def _lock_of(state: Path) -> tuple[str, int, int]:
    status = (state / lock.FILE_NAME).stat()
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return boot, status.st_dev, status.st_ino
