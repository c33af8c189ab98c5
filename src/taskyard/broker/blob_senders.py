"""Senders of blobs: a submission may name only what its key has sent, or what a task names.

The digest of a blob alone is no right to read it. A task that names it would be one, so a client
with a key must prove that it has the bytes: it sends them, even if they are here already. Forgets
everything at a restart, and what was noted long ago: then a client sends its bytes once more.
Knows no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from taskyard.journal.archive import Archive

#: Blobs that are remembered, each with a key that sent it, or as named by a task.
KNOWN_MAX: Final = 100_000

#: Stands for a key: a task names the blob.
_NAMED: Final = b""


class BlobSenders:
    """The blobs that each key has sent, and those that tasks name."""

    def __init__(self, index: Archive | None = None) -> None:
        """`index` has the blobs that ended tasks name."""
        self._index = index
        #: Keys and blobs, the last noted last.
        self._known: dict[tuple[bytes, str], None] = {}

    def note_sent(self, key: bytes, name: str) -> None:
        """Note that a key has sent all of a blob."""
        self._known.pop((key, name), None)
        self._known[key, name] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def note_named(self, name: str) -> None:
        """Note a blob that the record of a task names."""
        self.note_sent(_NAMED, name)

    def may_name(self, key: bytes, name: str) -> bool:
        """Return whether a submission of this key may name a blob."""
        if (key, name) in self._known or (_NAMED, name) in self._known:
            return True
        return self._index is not None and name in self._index.blobs_named([name])
