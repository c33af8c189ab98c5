"""The second witness: how far the journal went, written outside of it.

SQLite drops the end of a damaged log without a word; the witness remembers that there was more. It
is written after each commit and before the answers, with one write and no sync: after a power cut
it may be old, and an old witness is harmless, because the journal may be longer than it says.

Two slots take turns, so that a torn write spoils one and leaves the other. A slot is a sealed head,
with the journal's identity: a journal or a witness from elsewhere is noticed. The file is whole and
synced before its journal exists, so a missing or unreadable one means that something happened.
"""

import errno
import os
from pathlib import Path

from taskyard.errors import JournalDamaged
from taskyard.journal.chain import SEALED_BYTES, Head, seal, unseal
from taskyard.journal.files import create_private, open_regular, sync_directory

FILE_NAME = "witness"

#: Slots lie a disk's block apart: a write that a power cut tears spoils one block, hence one slot.
SLOT_SPACING_BYTES = 4096
_OFFSETS = (0, SLOT_SPACING_BYTES)

#: What follows from a witness that can't testify.
END_UNKNOWN = "whether the journal lost its end can't be told"


def create(directory: Path, identity: bytes, head: Head) -> None:
    """Put a whole, synced witness in place; what happens before the rename leaves none."""
    sealed = seal(identity, head)
    unfinished = directory / f"{FILE_NAME}.new"
    create_private(unfinished, sealed.ljust(SLOT_SPACING_BYTES, b"\0") + sealed)
    unfinished.rename(directory / FILE_NAME)
    sync_directory(directory)


def read(directory: Path) -> tuple[bytes, Head] | None:
    """The journal's identity and the newest head seen; None if there is no witness at all."""
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
    """The open file of a journal that was verified against it."""

    def __init__(self, directory: Path, identity: bytes) -> None:
        self._identity = identity
        self._descriptor = open_regular(directory / FILE_NAME, os.O_RDWR)
        heads = [self._sequence_at(offset) for offset in _OFFSETS]
        #: The slot to write next: never the one that holds the newest head.
        self._next = 0 if heads[0] < heads[1] else 1

    def _sequence_at(self, offset: int) -> int:
        witnessed = unseal(os.pread(self._descriptor, SEALED_BYTES, offset))
        return witnessed[1].sequence if witnessed else -1

    def update(self, head: Head) -> None:
        """Remember `head` over the older slot; never synced, see above."""
        sealed = seal(self._identity, head)
        written = os.pwrite(self._descriptor, sealed, _OFFSETS[self._next])
        if written != len(sealed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FILE_NAME)
        self._next = 1 - self._next

    def close(self) -> None:
        os.close(self._descriptor)
