"""The blobs of a broker in its database.

Nothing of them is on this machine, so any broker of the store can continue at once. Knows no SQL.
Needs the extra `postgres`, so it is imported only by its users.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.core.output import Stream
from taskyard.errors import TaskyardError, UnusableStore
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import (
    FOLDER,
    BlobFile,
    BlobId,
    BytesDiffer,
    StreamHashes,
    StreamKey,
    length_of,
)
from taskyard.journal.postgres import blobs, database, leader
from taskyard.journal.postgres.blobs import SEALED, STREAM, Blobs, Part, StoredBlob
from taskyard.journal.postgres.leader import Term
from taskyard.journal.postgres.move import LocalBlob
from taskyard.net.keyring import DIRECTORY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


logger = logging.getLogger("taskyard.broker")

#: Streams whose length is in memory.
_LENGTHS_MAX: Final = 10_000


class BlobRows:
    """Implements `BlobStore`. The chunks of a turn are written by one statement, in `flush`."""

    def __init__(self, tables: Blobs) -> None:
        self._tables = tables
        self._parts: list[Part] = []
        self._dropped: list[bytes] = []
        #: Lengths of streams, with parts that are not written yet.
        self._lengths: OrderedDict[StreamKey, int] = OrderedDict()
        self._hashes = StreamHashes()
        self.bytes_used = 0

    def append(self, key: StreamKey, offset: int, data: bytes) -> int:
        length = self.length(key)
        if offset > length:
            return length
        known = min(length - offset, len(data))
        if known:
            self.flush()
            found = self._tables.read(STREAM, _encode(key), offset, known)
            if found is None or found[0] != data[:known]:
                raise BytesDiffer(f"bytes from {offset:,} on differ from those that are there")
        new = data[known:]
        if new:
            self._parts.append(Part(_encode(key), length, new))
            self._hashes.add(key, length, new)
            self._lengths[key] = length + len(new)
            self.bytes_used += len(new)
        return length + len(new)

    def flush(self) -> None:
        if self._parts:
            self._tables.append(STREAM, self._parts, time.time_ns())
            self._parts = []
        if self._dropped:
            self.bytes_used -= self._tables.remove(STREAM, self._dropped)[0]
            self._dropped = []

    def seal(self, key: StreamKey, name: str) -> bool:
        self.flush()
        length = min(self.length(key), length_of(name))
        if length < self.length(key):  # of another history of this state
            self.bytes_used -= self.length(key) - length
            self._hashes.forget(key)
        digest = self._hashes.digest(
            key, length, lambda at, count: self._read(key, at, count) or b""
        )
        if length != length_of(name) or not digest or not name.startswith(digest.hex()):
            self.drop(key)
            return False
        self._tables.seal(_encode(key), name.encode(), length, time.time_ns())
        self._forget(key)
        return True

    def length(self, key: StreamKey) -> int:
        length = self._lengths.pop(key, None)
        if length is None:
            length = self._tables.size(STREAM, _encode(key)) or 0
        self._lengths[key] = length
        if len(self._lengths) > _LENGTHS_MAX:
            self._lengths.popitem(last=False)
        return length

    def drop(self, key: StreamKey) -> None:
        self._forget(key)
        self._dropped.append(_encode(key))

    def read(self, blob: BlobId, offset: int, count: int) -> tuple[bytes, int] | None:
        return self._tables.read(*_row(blob), offset, count)

    def touch(self, name: str) -> bool:
        return self._tables.touch(SEALED, name.encode(), time.time_ns()) == length_of(name)

    def remove(self, blob: BlobId, unused_since_ns: int) -> bool:
        kind, name = _row(blob)
        bytes_total, count = self._tables.remove(kind, [name], unused_since_ns)
        self.bytes_used -= bytes_total
        return count > 0

    def walk(self) -> Iterator[BlobFile]:
        for name, bytes_total, used_ns in self._tables.walk(SEALED):
            yield BlobFile(name.decode(), bytes_total, used_ns)
        for name, bytes_total, used_ns in self._tables.walk(STREAM):
            yield BlobFile(_decode(name), bytes_total, used_ns)

    def close(self) -> None:
        self._tables.close()

    def _read(self, key: StreamKey, offset: int, count: int) -> bytes | None:
        found = self._tables.read(STREAM, _encode(key), offset, count)
        return None if found is None else found[0]

    def _forget(self, key: StreamKey) -> None:
        self._lengths.pop(key, None)
        self._hashes.forget(key)


def _row(blob: BlobId) -> tuple[str, bytes]:
    """Return the kind and the name of a row."""
    return (STREAM, _encode(blob)) if isinstance(blob, StreamKey) else (SEALED, blob.encode())


def _encode(key: StreamKey) -> bytes:
    """Return the name of a stream's row."""
    numbers = (key.attempt, key.stream, len(key.campaign))
    return b"%d/%d/%d/" % numbers + key.campaign + key.name


def _decode(name: bytes) -> StreamKey:
    attempt, stream, length, names = name.split(b"/", 3)
    campaign_bytes = int(length)
    return StreamKey(
        names[:campaign_bytes], names[campaign_bytes:], int(attempt), Stream(int(stream))
    )


def open_blobs(
    url: str, files: Path | None, term: Term, reconnect_seconds_max: float
) -> Blobs | None:
    """Open the tables for a broker that leads. None: blobs are in a directory."""
    place = blobs.DATABASE if files is None else blobs.DIRECTORY
    with database.open_database(url) as connection:
        blobs.note_place(connection, term, place)
    if files is not None:
        return None
    threading.Thread(
        target=_remove_unclaimed, args=(url, term), name="taskyard-blobs", daemon=True
    ).start()
    return Blobs(url, term, reconnect_seconds_max)


def _remove_unclaimed(url: str, term: Term) -> None:
    """Remove what killed brokers left behind, in a thread: there may be many rows."""
    try:
        with Blobs(url, term) as own:
            own.remove_unclaimed()
    except TaskyardError as error:  # the next broker tries again
        logger.warning("unfinished blobs of earlier brokers: not removed: %s", error)


def open_beside(url: str) -> Blobs | None:
    """Open the tables with the term of the broker that runs now, if there is one.

    None: blobs are in a directory.
    """
    with database.open_database(url) as connection:
        database.check_tables(connection)
        if blobs.known_place(connection) != blobs.DATABASE:
            return None
        seen = leader.read(connection)
    return Blobs(url, Term(seen.epoch, seen.holder))


def check_place(url: str, state: Path, files: Path | None) -> None:
    """Refuse a place of blobs that is not the one of the store."""
    with database.open_database(url) as connection:
        database.check_tables(connection)
        known = blobs.known_place(connection)
    if known == blobs.DATABASE and files is not None:
        raise UnusableStore("blobs of the store are in the database (start without --files)")
    link = state / FOLDER
    if files is None and (known == blobs.DIRECTORY or link.is_symlink()):
        where = f" {link.readlink().parent}" if link.is_symlink() else ""
        raise UnusableStore(f"blobs of the store are in a directory{where} (give it with --files)")


class StateFiles:
    """The blobs in a state directory, for `store move`."""

    folders = (FOLDER,)
    keys_folder = DIRECTORY_NAME

    @staticmethod
    def walk(state: Path) -> Iterator[LocalBlob]:
        files = BlobFiles(state / FOLDER)
        for found in files.walk():
            yield LocalBlob(*_row(found.id), files.path(found.id), found.used_ns)

    @staticmethod
    def write(state: Path, kind: str, blob: StoredBlob, contents: Iterable[bytes]) -> None:
        files = BlobFiles(state / FOLDER)
        found: BlobId = _decode(blob.name) if kind == STREAM else blob.name.decode()
        path = files.path(found)
        if isinstance(found, StreamKey):
            offset = 0
            for content in contents:
                offset = files.append(found, offset, content)
            files.close()
        else:
            with files.unfinished(found) as (unfinished, descriptor):
                for content in contents:
                    os.write(descriptor, content)
                os.fsync(descriptor)
                files.publish(unfinished, found)
        os.utime(path, ns=(blob.used_ns, blob.used_ns))
