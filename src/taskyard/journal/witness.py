"""The witness: a record of the journal's newest row, kept outside the journal.

SQLite silently drops the end of a damaged log. The witness reveals that. It is written after each
commit and before the replies, with one write and no sync. After a power cut it may be old, which is
harmless: the journal may be longer than its witness.

Two slots alternate, so that a torn write spoils only one of them. A slot is a sealed head with the
journal's identity, so a file from another journal is detected. The witness is complete and synced
before its journal exists, so a missing or unreadable witness means damage.
"""

import errno
import os
from pathlib import Path

from taskyard.errors import JournalDamaged
from taskyard.journal.chain import SEALED_BYTES, Head, seal, unseal
from taskyard.journal.files import open_regular, replace_private

FILE_NAME = "witness"

#: Slots are one disk block apart: a torn write spoils one block, so only one slot.
SLOT_SPACING_BYTES = 4096
_OFFSETS = (0, SLOT_SPACING_BYTES)

#: The consequence of a missing or unreadable witness.
END_UNKNOWN = "the journal may have lost its end"


def create(directory: Path, identity: bytes, head: Head) -> None:
    """Create a complete, synced witness, atomically by a rename."""
    sealed = seal(identity, head)
    replace_private(directory / FILE_NAME, sealed.ljust(SLOT_SPACING_BYTES, b"\0") + sealed)


def read(directory: Path) -> tuple[bytes, Head] | None:
    """Return the journal's identity and the newest witnessed head. None without a witness."""
    try:
        content = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return None
    seen = [witnessed for offset in _OFFSETS if (witnessed := _slot(content, offset))]
    if not seen:
        raise JournalDamaged("the witness is unreadable", END_UNKNOWN)
    return max(seen, key=lambda witnessed: witnessed[1].sequence)


def _slot(content: bytes, offset: int) -> tuple[bytes, Head] | None:
    return unseal(content[offset : offset + SEALED_BYTES])


class Witness:
    """The open witness file of a verified journal."""

    def __init__(self, directory: Path, identity: bytes) -> None:
        self._identity = identity
        self._descriptor = open_regular(directory / FILE_NAME, os.O_RDWR)
        heads = [self._sequence_at(offset) for offset in _OFFSETS]
        #: The slot to write next, never the slot with the newest head.
        self._next = 0 if heads[0] < heads[1] else 1

    def _sequence_at(self, offset: int) -> int:
        witnessed = unseal(os.pread(self._descriptor, SEALED_BYTES, offset))
        return witnessed[1].sequence if witnessed else -1

    def update(self, head: Head) -> None:
        """Write `head` over the older slot, without a sync (see above)."""
        sealed = seal(self._identity, head)
        if os.pwrite(self._descriptor, sealed, _OFFSETS[self._next]) != SEALED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FILE_NAME)
        self._next = 1 - self._next

    def close(self) -> None:
        os.close(self._descriptor)
